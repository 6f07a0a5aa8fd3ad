"""The sections `distributed` and `recompute` of RUN.yaml, and what must hold between their fields.

How many processes train, what each of them holds, and what is computed twice to save memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from onward.parameters.field_types import (
    STRICT,
    Count,
    CountFromZero,
    Flag,
    OneOf,
    Positive,
    Share,
    ShareBelowOne,
    ZeroStage,
)
from onward.parameters.renamed import accepts_old_names
from onward.schedules.pipeline import registry

if TYPE_CHECKING:
    from onward.parameters import Parameters

PipelineSchedule = Annotated[str, OneOf(lambda: [(kind.name, "") for kind in registry.PIPELINES])]


@dataclass(frozen=True, kw_only=True)
class Distributed:
    """How many processes, and what each does; the product of the sizes is the number of processes.

    Attributes:
        layout: `manual`: as the fields below say; `auto`: `onward train` chooses the sizes, schedule, ZeRO, micro-batch
            and recompute in which an update of `training.batch_size * gradient_accumulation_steps` samples is fastest.
            `distributed: auto` is short for it.
        ranks: how many processes `layout: auto` spreads the run over, where no launcher says it; absent: one for each
            GPU.
        data_parallel_size: replicas, each with its own part of the data.
        horizontal_parallel_size: tensor parallelism: ranks that share the weights of a layer.
        pipeline_parallel_size: pipeline parallelism: ranks that share the layers.
        context_parallel_size: context parallelism: replicas that share the sequences of the same samples, each a part
            of the activations.
        expert_parallel_size: expert parallelism: replicas in succession that share the experts of every layer; tokens
            travel to their experts and back. Divides `data_parallel_size * context_parallel_size`.
        expert_capacity_factor: in training, an expert takes at most so many times an equal share of a process's tokens
            in a micro-batch, and drops the others, which then lack its part of their result. Absent: no token is
            dropped.
        zero_stage: 0: every replica holds everything; 1: moments are sharded over the replicas; 2: gradients,
            too; 3: weights, too.
        zero_group_size: shard among so many consecutive replicas, such as those of a node; every such group holds
            everything; gradients are then also averaged over the groups. Absent: among all replicas.
        sync_every_updates: local SGD: the replicas are workers, each of which takes so many weight updates with its own
            gradients and its own optimizer; then an outer optimizer moves the weights that all workers continue with
            by the mean of what they changed. 500 is usual for DiLoCo. Absent: gradients are reduced at every update.
        replicas_per_worker: so many consecutive replicas, such as those of a node, reduce gradients at every update and
            are one worker. Absent: `zero_group_size` where ZeRO shards, else as few as share sequences or experts.
        outer_optimizer: `nesterov`: SGD with Nesterov momentum, as DiLoCo; `sgd`: SGD, which with a rate of 1 and
            without momentum gives the mean of the workers' weights.
        outer_lr: learning rate of the outer optimizer; absent: 0.7 for `nesterov`, 1 for `sgd`.
        outer_momentum: momentum of the outer optimizer; absent: 0.9 for `nesterov`, 0 for `sgd`.
        zero_offload_to_cpu: keep the sharded weights, gradients and moments in host memory (zero_stage 1 to 3).
        enable_adasum: combine the replicas' gradients by Adasum instead of the mean.
        reduction_type: element type in which gradients are reduced: `fp32`, `fp16` or `bf16`.
        sum_in_fp32: gradients that travel in 16 bits (`reduction_type`) are added in fp32, so that they are rounded
            twice at most, with any number of replicas.
        synchronize_batch_norm: batch statistics over all replicas instead of each replica's own.
        sequence_parallel: also shard the activations between tensor-parallel layers, by tokens.
        allow_whole_layers: layers whose heads, groups or channels horizontal_parallel_size does not divide stay
            unsharded on every rank; otherwise such a run is refused.
        pipeline_partition_cut_list: where stages end: `tensor:consumer/consumer-tensor...` per cut, cuts as a list or
            separated by commas; a tensor alone stands for all its consumers. Absent: balanced by cost.
        op_id_to_stage: name of a node, or of its output -> stage; another way to set the same.
        pipeline_stage_paths: one ONNX model per stage, cut already; the inputs of each are outputs of earlier ones.
            They are trained instead of `paths.model_path`.
        pipeline_schedule: {names}.
        stage_memory_gb: where stages are balanced by cost, no stage may need more than this for weights, gradients,
            Adam's moments and kept activations, in 10^9 bytes, as if nothing else sharded them.
        stages_per_rank: of the interleaved schedules (absent: 2); `ZBVZeroBubble` always has 2, the others 1.
        use_nccl: absent: NCCL on GPUs, Gloo on CPUs; true requires NCCL, false Gloo.
        timeout_seconds: how long a collective may wait for the slowest process before the run ends.
        start_timeout_seconds: how long the rendezvous of the processes may take.
        slow_rank_period: weight updates between two comparisons of what every process does by itself, without waiting
            for others; a process that is slow is named in a message. 0: none.
        slow_rank_ratio: a process is slow whose own work takes so many times as long as the median of those that do
            the same work, twice in a row.
        max_restarts: how often `onward train` restarts the processes that it started itself, after a crash, a hang or
            memory that ran out, without a new checkpoint in between; 0: never. Absent: 3 where
            `checkpoint.checkpoints_dir` is set. One process alone is restarted only if this is set.
        elastic: train with as many replicas as the processes that torchrun, mpirun or srun started; `batch_size`,
            `gradient_accumulation_steps` and `data_parallel_size` only say how many samples make an update.
            Micro-batches and accumulation adapt so that it stays that many, and fields in steps are converted.
    """

    __pydantic_config__ = STRICT
    layout: Literal["manual", "auto"] = "manual"
    ranks: Count | None = None
    data_parallel_size: Count = 1
    horizontal_parallel_size: Count = 1
    pipeline_parallel_size: Count = 1
    context_parallel_size: Count = 1
    expert_parallel_size: Count = 1
    expert_capacity_factor: Positive | None = None
    zero_stage: ZeroStage = 0
    zero_group_size: Count | None = None
    sync_every_updates: Count | None = None
    replicas_per_worker: Count | None = None
    outer_optimizer: Literal["nesterov", "sgd"] = "nesterov"
    outer_lr: Positive | None = None
    outer_momentum: ShareBelowOne | None = None
    zero_offload_to_cpu: Flag = False
    enable_adasum: Flag = False
    reduction_type: Literal["fp32", "fp16", "bf16"] = "fp32"
    sum_in_fp32: Flag = False
    synchronize_batch_norm: Flag = False
    sequence_parallel: Flag = False
    allow_whole_layers: Flag = False
    pipeline_partition_cut_list: str | tuple[str, ...] | None = None
    op_id_to_stage: Mapping[str, CountFromZero] = field(default_factory=dict)
    pipeline_stage_paths: tuple[Path, ...] = ()
    pipeline_schedule: PipelineSchedule = "1F1B"
    stage_memory_gb: Positive | None = None
    stages_per_rank: Count | None = None
    use_nccl: Flag | None = None
    timeout_seconds: Positive = 600.0
    start_timeout_seconds: Positive = 300.0
    slow_rank_period: CountFromZero = 20
    slow_rank_ratio: Positive = 1.5
    max_restarts: CountFromZero | None = None
    elastic: Flag = False

    @property
    def world_size(self) -> int:
        """How many processes the sizes ask for."""
        return math.prod(self._sizes().values())

    @property
    def worker_size(self) -> int | None:
        """How many replicas are one worker of local SGD; None: there is none."""
        if self.sync_every_updates is None:
            return None
        of_zero = self.zero_group_size if self.zero_stage else None
        shared = math.lcm(self.context_parallel_size, self.expert_parallel_size)
        return self.replicas_per_worker or of_zero or shared

    @property
    def outer_momentum_used(self) -> float:
        """`outer_momentum`, or its default."""
        default = 0.9 if self.outer_optimizer == "nesterov" else 0.0
        return default if self.outer_momentum is None else self.outer_momentum

    @property
    def outer_tensors(self) -> int:
        """How many tensors local SGD keeps for each weight: as it was synchronized last, and momentum."""
        return 0 if self.sync_every_updates is None else 1 + (self.outer_momentum_used > 0)

    @property
    def product(self) -> str:
        """The sizes as a product, for messages."""
        return " * ".join(f"{name} {size}" for name, size in self._sizes().items())

    def _sizes(self) -> dict[str, int]:
        sizes = {
            "data_parallel_size": self.data_parallel_size,
            "horizontal_parallel_size": self.horizontal_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
        }
        return (
            sizes if self.context_parallel_size == 1 else {**sizes, "context_parallel_size": self.context_parallel_size}
        )


@accepts_old_names("recompute")
@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Trading time for memory: activations are recomputed in the backward pass instead of being kept for it.

    Attributes:
        segments: recompute entire segments (the layers between two cut points of the graph).
        attention: recompute only the attention of every layer.
        number_recompute_layers: of these, only the first so many of every process; 0: all.
        memory_budget: share of the activations' memory that may be kept, from 0 (recompute all) to 1 (nothing);
            chooses by itself which segments to recompute. Absent: the two flags decide.
        cheap_activations: recompute inputs of linear layers that are cheap to compute (norms, GELU, Swish, SwiGLU)
            instead of keeping them for the gradients of the layers' weights; on a CPU also what follows a batch
            normalization. Compiled code does both on every device, on a CPU where they are not narrow. Formerly
            `cheap_inputs`, which is deprecated.
    """

    __pydantic_config__ = STRICT
    segments: Flag = False
    attention: Flag = False
    number_recompute_layers: CountFromZero = 0
    memory_budget: Share | None = None
    cheap_activations: Flag = True


def stages_of_a_rank(distributed: Distributed) -> int:
    """How many pipeline stages one process holds under the schedule that is asked for."""
    return registry.pipeline_named(distributed.pipeline_schedule).stages_per_rank or distributed.stages_per_rank or 2


CHOSEN_BY_LAYOUT = (
    "data_parallel_size", "horizontal_parallel_size", "pipeline_parallel_size", "context_parallel_size",
    "expert_parallel_size", "zero_stage", "zero_group_size", "sequence_parallel",
    "pipeline_partition_cut_list", "op_id_to_stage", "pipeline_stage_paths", "pipeline_schedule", "stage_memory_gb",
    "stages_per_rank", "enable_adasum",
)  # fmt: skip
"""Fields that `layout: auto` chooses or leaves out."""


def distribution_problems(distributed: Distributed, gradient_accumulation_steps: int) -> list[str]:
    """What is wrong with the fields of `distributed` in combination, one sentence each."""
    default = Distributed()
    given = [name for name in CHOSEN_BY_LAYOUT if getattr(distributed, name) != getattr(default, name)]
    problems = []
    if distributed.layout == "auto" and given:
        problems.append(
            f"distributed.layout is auto, which chooses {', '.join(given)}. Leave that out, or set layout to manual."
        )
    if distributed.enable_adasum and distributed.zero_stage:
        problems.append(
            f"distributed.enable_adasum is true and zero_stage is {distributed.zero_stage}; Adasum needs every "
            "replica's full gradients. Leave one of the two out."
        )
    if distributed.enable_adasum and distributed.context_parallel_size > 1:
        problems.append(
            f"distributed.enable_adasum is true and context_parallel_size is {distributed.context_parallel_size}; "
            "Adasum combines gradients of different samples, and these replicas read the same. Leave one of the two "
            "out."
        )
    if distributed.zero_offload_to_cpu and not distributed.zero_stage:
        problems.append("distributed.zero_offload_to_cpu is true, but zero_stage is 0; set a stage from 1 to 3.")
    group, replicas = distributed.zero_group_size, distributed.data_parallel_size * distributed.context_parallel_size
    if group is not None and not distributed.zero_stage:
        problems.append(f"distributed.zero_group_size is {group}, but zero_stage is 0; set a stage from 1 to 3.")
    elif group is not None and (group == 1 or replicas % group):
        problems.append(
            f"distributed.zero_group_size is {group}, but there are {replicas} replicas (data_parallel_size "
            f"{distributed.data_parallel_size} * context_parallel_size {distributed.context_parallel_size}), which "
            "groups of at least 2 share equally. Set a divisor of that above 1."
        )
    if distributed.sum_in_fp32 and (distributed.reduction_type == "fp32" or distributed.enable_adasum):
        problems.append(
            "distributed.sum_in_fp32 is true, but gradients travel in fp32. Set reduction_type to bf16 or fp16 "
            "without enable_adasum, or remove it."
        )
    if distributed.sequence_parallel and distributed.horizontal_parallel_size == 1:
        problems.append(
            "distributed.sequence_parallel is true, but horizontal_parallel_size is 1; it shards the activations "
            "between tensor-parallel layers. Set a size above 1, or remove it."
        )
    if distributed.allow_whole_layers and distributed.horizontal_parallel_size == 1:
        problems.append(
            "distributed.allow_whole_layers is true, but horizontal_parallel_size is 1, which divides everything; "
            "leave it out."
        )
    return problems + _expert_problems(distributed) + _pipeline_problems(distributed, gradient_accumulation_steps)


def _expert_problems(distributed: Distributed) -> list[str]:
    size, replicas = (
        distributed.expert_parallel_size,
        distributed.data_parallel_size * distributed.context_parallel_size,
    )
    if size == 1:
        return []
    where, problems = f"distributed.expert_parallel_size is {size}", []
    if replicas % size:
        problems.append(
            f"{where}, and experts are shared among replicas, of which there are {replicas} (data_parallel_size * "
            f"context_parallel_size). Set it to a divisor of {replicas}, or use more replicas."
        )
    if distributed.zero_stage > 1 and replicas != size:
        problems.append(
            f"{where} and zero_stage is {distributed.zero_stage}, which shards gradients over all {replicas} replicas, "
            f"but an expert is on {replicas // size} of them. Set zero_stage to 0 or 1, or expert_parallel_size to "
            f"{replicas}."
        )
    if distributed.enable_adasum:
        problems.append(
            f"{where} and enable_adasum is true; Adasum combines gradients of full replicas, and these hold different "
            "experts. Leave one of the two out."
        )
    return problems


def elastic_problems(parameters: Parameters) -> list[str]:
    """What a run whose number of replicas changes cannot do, or needs."""
    if not parameters.distributed.elastic:
        return []
    last_batch = parameters.data.last_batch
    obstacles = {
        "distributed.layout is auto": parameters.distributed.layout == "auto",
        "distributed.expert_parallel_size is above 1, which need not divide the replicas that are left": (
            parameters.distributed.expert_parallel_size > 1
        ),
        "distributed.enable_adasum is true, whose updates depend on the number of replicas": (
            parameters.distributed.enable_adasum
        ),
        "training.find_batch_size is true": parameters.training.find_batch_size,
        f"data.last_batch is {last_batch}, with which updates have fewer samples than others": last_batch != "wrap",
    }
    problems = [
        f"distributed.elastic is true, but {reason}. Leave one of the two out."
        for reason, is_met in obstacles.items()
        if is_met
    ]
    if parameters.checkpoint.checkpoints_dir is None:
        problems.append(
            "distributed.elastic is true, but checkpoint.checkpoints_dir is missing; a run resumes from a checkpoint "
            "when the number of its processes changes. Set the folder."
        )
    return problems


def _pipeline_problems(distributed: Distributed, micro_batches: int) -> list[str]:
    size, schedule = distributed.pipeline_parallel_size, distributed.pipeline_schedule
    kind = registry.pipeline_named(schedule)
    ways = ("pipeline_partition_cut_list", "op_id_to_stage", "pipeline_stage_paths")
    given = [name for name in ways if getattr(distributed, name)]
    problems = []
    if len(given) > 1:
        problems.append(
            f"distributed: {' and '.join(given)} are given, but the stages can be cut in one way only. Remove all but "
            "one."
        )
    if given and size == 1:
        problems.append(f"distributed.{given[0]} is given, but pipeline_parallel_size is 1; there is nothing to cut.")
    if distributed.stage_memory_gb is not None and (given or size == 1):
        reason = f"{given[0]} says where they are cut" if given else "pipeline_parallel_size is 1"
        problems.append(
            f"distributed.stage_memory_gb is {distributed.stage_memory_gb:g}, which bounds stages that are balanced, "
            f"but {reason}. Leave one of the two out."
        )
    if distributed.stages_per_rank not in (None, stages_of_a_rank(distributed)):
        problems.append(
            f"distributed.stages_per_rank is {distributed.stages_per_rank}, but {schedule} has "
            f"{stages_of_a_rank(distributed)}; leave it out, or use an interleaved schedule."
        )
    if size > 1 and kind.takes_groups and micro_batches % size:
        problems.append(
            f"distributed.pipeline_schedule is {schedule}, whose micro-batches come in groups of the pipeline's size, "
            f"{size}; training.gradient_accumulation_steps, the micro-batches of an update, is {micro_batches}. "
            f"Use a multiple of {size}."
        )
    if size > 1 and kind.needs_one_for_each_rank and micro_batches < size:
        problems.append(
            f"distributed.pipeline_schedule is {schedule} over {size} processes, which needs at least {size} "
            f"micro-batches for an update; training.gradient_accumulation_steps is {micro_batches}. Raise it to {size} "
            "or more (a multiple of it wastes least), or use GPipe."
        )
    return problems
