"""The sections `mixed_precision`, `speed` and `machine` of RUN.yaml: how and on what a run computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pydantic

from onward.parameters.field_types import STRICT, Count, CountFromZero, Flag, NonNegative, Positive, auto_or_flag

if TYPE_CHECKING:
    from onward.parameters import Parameters

FusionName = Literal[
    "attention",
    "normalization",
    "group_normalization",
    "gelu",
    "swish",
    "swiglu",
    "softplus",
    "nan_to_num",
    "rotary_embedding",
    "cross_entropy",
    "linear",
    "joined_relu",
    "pooled_relu",
    "experts",
    "embedding_bag",
]


@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """Mixed precision with fp32 master weights.

    Attributes:
        use_mixed_precision: compute in fp16, or bf16 with `use_bfloat16`. `auto`: in bf16 on GPUs that compute in it,
            and on CPUs whose matmuls are measured to be at least 1.25 times as fast in bf16 as in fp32; else in the
            model's own types. A note says what was chosen and why; a run that resumes keeps the choice.
        use_bfloat16: bf16 needs no loss scale.
        loss_scale: of fp16; 0: dynamic, from 65536; else fixed.
        float8: multiply activations and weights in FP8 where both sizes of a weight divide by 16; everything
            else computes as without it, and weights and moments stay in fp32. Needs an Ada, Hopper or newer GPU;
            on a CPU it is for trying out.
    """

    __pydantic_config__ = STRICT
    use_mixed_precision: Literal["auto", True, False] = False
    use_bfloat16: Flag = False
    loss_scale: NonNegative = 0.0
    float8: Flag = False

    @pydantic.field_validator("use_mixed_precision", mode="before")
    @classmethod
    def _choice(cls, value: Any) -> Any:
        return auto_or_flag(value)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What makes a step faster or smaller without changing what it computes.

    Attributes:
        fuse: compute attention, norms, activations, rotary embeddings and the last linear layer with its loss in one
            call each where the model writes them out in many nodes; `onward inspect` lists them. What is exported
            never contains them.
        fusions_off: fusions to leave out: `attention`, `normalization`, `group_normalization`, `gelu`, `swish`,
            `swiglu`, `softplus`, `nan_to_num`, `rotary_embedding`, `cross_entropy`, `linear`, `joined_relu`,
            `pooled_relu`, `experts`, `embedding_bag`.
        join_layers: where nothing is compiled, linear layers that read the same (queries, keys and values; gate and
            value) are one function that adds up the gradient of what they read in place. Their weights stay their
            own.
        compile: whether torch compiles the code of each segment of the model, once for equal segments. `auto`:
            on GPUs; on CPUs in runs of at least 1,000 steps where it saves a twenty-fifth of a step and, over the run,
            five times what compiling takes, by estimate; a note says what was chosen and why. After eight different
            shapes of batches, others run uncompiled.
        channels_last: compute convolutions in channels-last (NHWC) memory format, which is faster on CPUs, and
            on GPUs with mixed precision; torch's compiler chooses the memory format of compiled code.
        cuda_graphs: record the compiled training passes as CUDA graphs and replay them. For one process whose batches
            have one shape, without accumulation and recompute.
        update_in_backward: update each weight inside the backward pass, as soon as its gradient is complete, and drop
            the gradient: those of all weights are never in memory at once. For one process without clipping,
            accumulation and fp16; a gradient that is not finite leaves only its own weight as it is.
    """

    __pydantic_config__ = STRICT
    fuse: Flag = True
    fusions_off: tuple[FusionName, ...] = ()
    join_layers: Flag = True
    compile: Literal["auto", True, False] = "auto"
    channels_last: Flag = True
    cuda_graphs: Flag = False
    update_in_backward: Flag = False

    @pydantic.field_validator("compile", mode="before")
    @classmethod
    def _choice(cls, value: Any) -> Any:
        return auto_or_flag(value)


def update_in_backward_problems(parameters: Parameters) -> list[str]:
    """What updates inside the backward pass do not go with, one sentence each."""
    if not parameters.speed.update_in_backward:
        return []
    split, training, precision = parameters.distributed, parameters.training, parameters.mixed_precision
    clip, accumulation = parameters.optimizer.max_norm_clip, training.gradient_accumulation_steps
    is_fp16 = precision.use_mixed_precision is True and not precision.use_bfloat16
    resized = [name for name in ("find_batch_size", "halve_batch_on_out_of_memory") if getattr(training, name)]
    layout = f"the sizes of distributed make {split.world_size} processes"
    if split.layout == "auto" or split.elastic:
        layout = "distributed.layout is auto" if split.layout == "auto" else "distributed.elastic is true"
    obstacles = {
        f"optimizer.max_norm_clip is {clip or 0:g}, and the norm of all gradients is known only when the weights are "
        "updated; remove max_norm_clip": clip is not None,
        f"training.gradient_accumulation_steps is {accumulation}, whose gradients would have to be kept; set it to 1": (
            accumulation > 1
        ),
        **{f"training.{name} is true, which may accumulate gradients; set batch_size": True for name in resized},
        "mixed_precision is fp16, whose loss scale is known to be too large only when weights are updated; set "
        "use_bfloat16": is_fp16,
        f"{layout}, and gradients are reduced over processes when all are there; train with one": (
            split.world_size > 1 or split.layout == "auto" or split.elastic
        ),
        "speed.cuda_graphs is true, and recorded passes hold no updates; remove cuda_graphs": (
            parameters.speed.cuda_graphs
        ),
    }
    return [
        f"speed.update_in_backward is true, but {reason}, or remove update_in_backward."
        for reason, is_met in obstacles.items()
        if is_met
    ]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The part of `Environment` that a RUN.yaml may set.

    Attributes:
        execution_provider: `CPU` or `CUDA`; absent: CUDA where there is a GPU.
        threads: CPU threads of one process; absent: torch's choice.
        deterministic: refuse operators whose result depends on timing.
        memory_gb: memory for the tensors of one process in GB (10^9 bytes), for `training.find_batch_size` and the
            verdict of `onward plan`; absent: nine tenths of what its GPU, or its share of the machine, has free.
        check_weights_period: weight updates between two checks for silent corruption: digests of weights, moments and
            running statistics are compared across all processes that hold the same ones, and with themselves from the
            first forward pass of an update to its optimizer step; replicas are compared before every checkpoint, too.
            A difference ends the run. 0: none.
        check_computation_period: weight updates between two micro-batches that every replica computes, comparing losses
            and gradients bit by bit; each costs a micro-batch. 0: none.
    """

    __pydantic_config__ = STRICT
    execution_provider: Literal["CPU", "CUDA"] | None = None
    threads: Count | None = None
    deterministic: Flag = False
    memory_gb: Positive | None = None
    check_weights_period: CountFromZero = 100
    check_computation_period: CountFromZero = 0
