"""A pipeline of stages on torch.distributed.pipelining: one update's forward and backward passes, and evaluation.

The schedules are torch's; what they run is `StageModule`. Shapes of what travels are found by passing the first
micro-batch through in evaluation mode, once for each new set of shapes, so that torch need not run it to find out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from onward.errors import DataError, ModelError, OnwardError, ParametersError, chain_of
from onward.parallel.data_parallel import reshard
from onward.parallel.launch.process import Mesh
from onward.parallel.pipeline import transfers
from onward.parallel.pipeline.shared_weights import sum_shared_gradients
from onward.parallel.pipeline.stage import StageModule
from onward.parameters.distributed import PipelineSchedule
from onward.plan.pipeline.schedules import SPLITS_BACKWARD, check_schedule, rank_of_stage
from onward.plan.pipeline.stages import StagePlan
from onward.schedules.pipeline.registry import pipeline_named

Features = Mapping[str, torch.Tensor]
Weights = Mapping[str, nn.Parameter]
_Signature = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


class Pipeline:
    """The stages of this rank, and their traffic with those of the other ranks of its pipeline.

    Args:
        mesh: whose dimension `pipeline` the stages are laid along.
        stage_modules: this rank's stages: `StageModule`s, which may be wrapped by DDP or sharded by `fully_shard`.
        plan: of all stages.
        schedule: which of torch's schedules.
        micro_batches: of one update.
        device: what this rank computes on.

    Raises:
        ParametersError: schedule, stages and micro-batches do not fit, or the schedule cannot run wrapped by DDP.
    """

    def __init__(
        self,
        mesh: Mesh,
        stage_modules: Mapping[int, nn.Module],
        plan: StagePlan,
        schedule: PipelineSchedule,
        micro_batches: int,
        device: torch.device,
    ) -> None:
        assert mesh.pipeline is not None, "a pipeline needs more than one rank"
        self.group = mesh.pipeline
        self.plan = plan
        self.schedule = schedule
        self.micro_batches = micro_batches
        self.device = device
        self.modules = dict(sorted(stage_modules.items()))
        self.rank = self.group.rank()
        size = self.group.size()
        check_schedule(schedule, size, len(plan), micro_batches)
        check_torch(schedule, plan)
        check_wrapping(schedule, self.modules.values())
        if schedule in SPLITS_BACKWARD:
            _keep_gathered(self.modules.values())
        self.ranks = tuple(rank_of_stage(schedule, size, stage) for stage in range(len(plan)))
        expected = [stage for stage, rank in enumerate(self.ranks) if rank == self.rank]
        assert list(self.modules) == expected, f"rank {self.rank} holds stages {list(self.modules)}, not {expected}"
        self._stages = {index: stage_module_in(module) for index, module in self.modules.items()}
        self._prepared: tuple[_Signature, Any] | None = None

    def run(self, features: Sequence[Features], factors: torch.Tensor) -> torch.Tensor:
        """The forward and backward passes of one update; gradients are added to those of the modules' parameters.

        Args:
            features: of every micro-batch, all inputs of the network, on every rank; of equal shapes.
            factors: [micro-batches]: what each micro-batch's loss is multiplied by before its backward pass.

        Returns:
            The micro-batches' losses [micro-batches], fp32, without the factors, on every rank of the pipeline.

        Raises:
            DataError: the micro-batches' number or shapes differ.
        """
        signature = self._signature_of(features)
        if self._prepared is None or self._prepared[0] != signature:
            self._prepared = (signature, self._prepare(features[0]))
        schedule = self._prepared[1]
        # torch splits tensors into micro-batches; here they are only numbered.
        numbers = [{"microbatch": index} for index in range(self.micro_batches)]
        schedule._split_inputs = lambda args, kwargs: ([()] * self.micro_batches, numbers)
        for stage in self._stages.values():
            stage.feed(features)
        with _own_errors():
            schedule.step(target=factors.to(self.device), return_outputs=False)
        last = self._stages.get(len(self.plan) - 1)
        if last is None:
            losses = torch.empty(self.micro_batches, dtype=torch.float32, device=self.device)
        else:
            losses = torch.stack([last.losses[index] for index in range(self.micro_batches)])
        dist.broadcast(losses, group=self.group, group_src=self.ranks[-1])
        for stage in self._stages.values():
            stage.feed(())
        return losses

    @torch.no_grad()
    def evaluate(self, features: Features, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Values of a batch by name, on every rank of the pipeline; in the training mode that the modules are in.

        Args:
            features: all inputs of the network, on every rank.
            names: outputs of the network, or first outputs of its nodes.

        Raises:
            ModelError: no stage computes a value of that name.
        """
        homes = {name: self._home_of(name) for name in names}
        _, found = self._pass_through(features, homes)
        return self._shared(found, homes)

    def watched_values(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """What the stages kept of the last micro-batch of an update, on every rank of the pipeline; each calls it."""
        kept = {name: value for stage in self._stages.values() for name, value in stage.kept.items()}
        return self._shared(kept, {name: self._home_of(name) for name in names})

    def _shared(self, found: Mapping[str, torch.Tensor], homes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Values that were found on this rank's stages, and those of the others."""
        results: dict[str, torch.Tensor] = {}
        for home in sorted(set(homes.values())):
            here = [name for name, stage in homes.items() if stage == home]
            mine = [found[name] for name in here] if home in self._stages else None
            shared = transfers.broadcast(mine, len(here), self.ranks[home], self.group, self.device)
            results |= dict(zip(here, shared, strict=True))
        return {name: results[name] for name in homes}

    def _home_of(self, name: str) -> int:
        stages = self.plan.stages
        holders = [s for s in stages if name in s.outputs] or [s for s in stages if name in s.nodes]
        if not holders:
            raise ModelError(f"no stage of the pipeline computes a value named {name!r}.")
        return holders[0].index

    def _pass_through(
        self, features: Features, homes: Mapping[str, int]
    ) -> tuple[dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]], dict[str, torch.Tensor]]:
        """One forward pass, stage by stage; what each of this rank's stages got and gave, and values by name."""
        traffic: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        found: dict[str, torch.Tensor] = {}
        given: list[torch.Tensor] = []
        for index, stage in self._stages.items():
            if index == 0:
                got: list[torch.Tensor] = []
            elif self.ranks[index - 1] == self.rank:
                got = given
            else:
                count = len(stage.stage.received)
                got = transfers.receive(count, self.ranks[index - 1], self.group, self.device)
            wanted = tuple(name for name, home in homes.items() if home == index)
            stage.feed([features], wanted)
            with _own_errors():
                values = _unwrapped(self.modules[index])(*got, microbatch=0)
            stage.feed(())
            reshard(self.modules[index])
            count = len(stage.stage.sent)
            given = list(values[:count])
            found |= dict(zip(wanted, values[count:], strict=True))
            traffic[index] = (got, given)
            if count and self.ranks[index + 1] != self.rank:
                transfers.send(given, self.ranks[index + 1], self.group, self.device)
        return traffic, found

    def _signature_of(self, features: Sequence[Features]) -> _Signature:
        if len(features) != self.micro_batches:
            raise DataError(f"an update takes {self.micro_batches} micro-batches; {len(features)} were given.")
        found = [_signature(one) for one in features]
        for number, other in enumerate(found):
            if other != found[0]:
                first, second = next((a, b) for a, b in zip(found[0], other, strict=False) if a != b)
                raise DataError(
                    f"the micro-batches of an update must have the same shapes in a pipeline: feature {first[0]!r} is "
                    f"{list(first[1])} in the first and {second[0]!r} {list(second[1])} in micro-batch {number}."
                )
        return found[0]

    def _prepare(self, features: Features) -> Any:
        """torch's schedule, for micro-batches of these shapes."""
        modes = {index: module.training for index, module in self.modules.items()}
        for module in self.modules.values():
            module.eval()  # running statistics stay as they are
        devices = [self.device] if self.device.type == "cuda" else []
        try:
            with torch.no_grad(), torch.random.fork_rng(devices):
                traffic, _ = self._pass_through(features, {})
        finally:
            for index, module in self.modules.items():
                module.train(modes[index])
        from torch.distributed import pipelining  # every run imports this module; few have a pipeline
        from torch.distributed.pipelining.schedules import PipelineScheduleMulti

        stages = []
        for index, module in self.modules.items():
            stage = self._stages[index].stage
            got, given = traffic[index]
            loss = [torch.empty((), dtype=torch.float32)] if index == len(self.plan) - 1 else []
            stages.append(
                pipelining.PipelineStage(
                    module,
                    index,
                    len(self.plan),
                    self.device,
                    input_args=_like(got, [transfer.with_gradient for transfer in stage.received]),
                    output_args=_like(given or loss, [transfer.with_gradient for transfer in stage.sent] or [True]),
                    group=self.group,
                )
            )
        kind = getattr(pipelining, pipeline_named(self.schedule).torch_class)
        several = issubclass(kind, PipelineScheduleMulti)
        return kind(stages if several else stages[0], self.micro_batches, loss_fn=_times_factor, scale_grads=False)

    def sum_shared_gradients(self) -> None:
        """Adds up the gradients of weights that several stages hold; each of them then has the same sum, bit by bit.

        Call it once for each update, after gradients were reduced over replicas.
        """
        holders = {index: cast(Weights, stage.network.weights) for index, stage in self._stages.items()}
        sum_shared_gradients(self.plan.shared_weights, holders, self.ranks, self.group)


def check_torch(schedule: PipelineSchedule, plan: StagePlan) -> None:
    """Checks that this torch can follow a schedule, and send what travels between the stages.

    Raises:
        ParametersError: it takes every value that a stage receives for one with a gradient.
    """
    if knows_gradients(torch.__version__):
        return
    if schedule in SPLITS_BACKWARD:
        raise ParametersError(
            f"distributed.pipeline_schedule {schedule} splits backward passes, and torch {torch.__version__} does so "
            "only where every value that is sent has a gradient. Use Interleaved1F1B, or torch 2.13 or newer."
        )
    others = [transfer.name for stage in plan.stages for transfer in stage.received if not transfer.with_gradient]
    if others:
        raise ParametersError(
            f"torch {torch.__version__} sends only values with a gradient from stage to stage; {', '.join(others)} "
            "would be sent without. Cut elsewhere (distributed.pipeline_partition_cut_list), or use torch 2.13 or "
            "newer."
        )


def knows_gradients(version: str) -> bool:
    """Whether torch of a version knows which values of a pipeline have gradients; 2.11 does not, 2.13 does."""
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= (2, 13)


def check_wrapping(schedule: PipelineSchedule, modules: Iterable[nn.Module]) -> None:
    """Checks that a schedule computes gradients in a way that the modules' wrapping notices.

    Raises:
        ParametersError: DDP waits for gradients of entire backward passes, which zero-bubble schedules do not make.
    """
    if schedule in SPLITS_BACKWARD and any(isinstance(module, DistributedDataParallel) for module in modules):
        raise ParametersError(
            f"distributed.pipeline_schedule {schedule} computes gradients of weights separately from those of "
            "activations, which torch's DistributedDataParallel does not see. Use Interleaved1F1B, or set zero_stage."
        )


def _keep_gathered(modules: Iterable[nn.Module]) -> None:
    """Leaves weights that ZeRO 3 gathers segment by segment gathered from the forward pass to the end of the update.

    Split backward passes look for the weights in the graph of the forward pass, and would find none of those that were
    put away in between; their gradients would be missing without a word.
    """
    for module in modules:
        for inner in module.modules():
            if isinstance(inner, FSDPModule):
                inner.set_reshard_after_forward(False, recurse=False)


def stage_module_in(module: nn.Module) -> StageModule:
    """The stage inside of a wrapped module."""
    return next(inner for inner in module.modules() if isinstance(inner, StageModule))


def _times_factor(loss: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return loss * factor[0]


def _signature(features: Features) -> _Signature:
    return tuple((name, tuple(value.shape), value.dtype) for name, value in sorted(features.items()))


def _like(tensors: Sequence[torch.Tensor], with_gradient: Sequence[bool]) -> tuple[torch.Tensor, ...]:
    """Shapes and types of tensors that travel, without memory."""
    return tuple(
        torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").requires_grad_(
            wanted and tensor.is_floating_point()
        )
        for tensor, wanted in zip(tensors, with_gradient, strict=True)
    )


def _unwrapped(module: nn.Module) -> Callable[..., Any]:
    """DDP's own forward is for training; `fully_shard` keeps the module, with hooks that gather its weights."""
    inner: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
    return inner


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Lets our own errors through torch's, which wrap whatever a stage raises."""
    try:
        yield
    except Exception as error:
        cause = next((one for one in chain_of(error, only_causes=True) if isinstance(one, OnwardError)), None)
        if cause is None or cause is error:
            raise
        raise cause from None
