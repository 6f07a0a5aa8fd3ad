"""Fields that have an effect only together with others: what each of them needs, and which are set for nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from onward.losses.registry import LOSSES
from onward.parameters.augmentation import Augmentation
from onward.parameters.frozen_weights import QUANTIZED_DTYPES
from onward.parameters.local_sgd import FIELDS
from onward.schedules.learning_rate.registry import DECAYS, decay_named
from onward.spelling import listed

if TYPE_CHECKING:
    from onward.parameters import Parameters


@dataclasses.dataclass(frozen=True)
class Need:
    """What a field needs to have an effect.

    Attributes:
        text: completes "it has an effect only ...".
        is_met: whether the parameters have it.
        is_refused: whether a run that lacks it is refused; otherwise a note reports it.
    """

    text: str
    is_met: Callable[[Parameters], Any]
    is_refused: bool = False


_EVALUATED = Need("without training.skip_evaluation", lambda p: not p.training.skip_evaluation)
_READERS = Need("with distributed.data_parallel_size above 1", lambda p: p.distributed.data_parallel_size > 1)
_REPLICAS = Need(
    "with distributed.data_parallel_size or context_parallel_size above 1",
    lambda p: p.distributed.data_parallel_size * p.distributed.context_parallel_size > 1,
)
_REDUCED = Need(
    "where several replicas reduce gradients at every update: with distributed.data_parallel_size or "
    "context_parallel_size above 1, and with sync_every_updates also replicas_per_worker",
    lambda p: (p.distributed.worker_size or p.distributed.data_parallel_size * p.distributed.context_parallel_size) > 1,
)
_PROCESSES = Need(
    "in a run of several processes",
    lambda p: p.distributed.world_size > 1,
)
_PIPELINE = Need("with distributed.pipeline_parallel_size above 1", lambda p: p.distributed.pipeline_parallel_size > 1)
_CHECKPOINTS = Need("with checkpoint.checkpoints_dir", lambda p: p.checkpoint.checkpoints_dir is not None)
_COMPARED = Need(
    "with early_stopping.patience or checkpoint.keep_best",
    lambda p: p.early_stopping.patience is not None or p.checkpoint.keep_best,
)
_SPIKES = Need("with on_bad_loss.spike_threshold", lambda p: p.on_bad_loss.spike_threshold is not None)
_PROFILED = Need("with profiler.first_step and last_step", lambda p: p.profiler.first_step is not None)
_FLAGS_DECIDE = Need("without recompute.memory_budget", lambda p: p.recompute.memory_budget is None)
_AUGMENTED = Need("with augmentation.feature", lambda p: p.augmentation.feature is not None)
_WANDB = Need("with wandb.project", lambda p: p.wandb.project is not None)
_MLFLOW = Need("with mlflow.experiment", lambda p: p.mlflow.experiment is not None)
_AIM = Need("with aim.experiment", lambda p: p.aim.experiment is not None)

_TAUGHT = Need("with distillation.teacher_path", lambda p: p.distillation.teacher_path)
_SOFT = Need(
    "with distillation.teacher_path and alpha above 0", lambda p: p.distillation.teacher_path and p.distillation.alpha
)
_QUANTIZED = Need("with quantize_aware.weights", lambda p: p.quantize_aware.weights is not None)
_PRUNED = Need("with pruning.pattern", lambda p: p.pruning.pattern is not None)
_BY_MAGNITUDE = Need("with pruning.pattern magnitude", lambda p: p.pruning.pattern == "magnitude", is_refused=True)
_LOCAL = Need(
    "with distributed.sync_every_updates",
    lambda p: p.distributed.sync_every_updates is not None,
    is_refused=True,  # without it another algorithm would train than was asked for
)
_AVERAGED = Need("with averaging.kind", lambda p: p.averaging.kind is not None)


def _with_loss(name: str) -> Need:
    return Need(f"with loss.type {name}", lambda p: p.loss.type == name)


def _of_decays(name: str) -> Need:
    readers = [decay.name for decay in DECAYS if name in decay.reads]
    return Need(
        f"with learning_rate.warmup_mode {listed(readers)}",
        lambda p: name in decay_named(p.learning_rate.warmup_mode).reads,
    )


_WHOLE_REPLICAS = Need(
    "with distributed.data_parallel_size above 1, and the sizes of pipeline, context and experts 1",
    lambda p: (
        p.distributed.data_parallel_size > 1
        and p.distributed.pipeline_parallel_size == p.distributed.context_parallel_size == 1
        and p.distributed.expert_parallel_size == 1
    ),
    is_refused=True,
)

NEEDS: dict[str, Need] = {
    "paths.eval_model_path": _EVALUATED,
    "paths.test_data_dir": _EVALUATED,
    **{f"loss.{name}": _with_loss(kind.name) for kind in LOSSES for name in kind.own_ports},
    **{f"augmentation.{one.name}": _AUGMENTED for one in dataclasses.fields(Augmentation) if one.name != "feature"},
    "training.accumulate_as": Need(
        "with training.gradient_accumulation_steps above 1", lambda p: p.training.gradient_accumulation_steps > 1
    ),
    "training.eval_batch_size": _EVALUATED,
    "training.evaluation_period": _EVALUATED,
    "training.evaluation_period_epochs": _EVALUATED,
    "training.metrics": _EVALUATED,
    **{f"learning_rate.{name}": _of_decays(name) for decay in DECAYS for name in decay.reads},
    **{f"distillation.{name}": _TAUGHT for name in ("alpha", "pairs")},
    **{f"distillation.{name}": _SOFT for name in ("teacher_logits", "temperature")},
    "distillation.pairs_weight": Need(
        "with distillation.teacher_path and pairs", lambda p: p.distillation.teacher_path and p.distillation.pairs
    ),
    **{f"quantize_aware.{name}": _QUANTIZED for name in ("activations", "per_channel", "observer")},
    **{f"pruning.{name}": _BY_MAGNITUDE for name in ("sparsity", "initial_sparsity", "end_update", "every_updates")},
    **{f"pruning.{name}": _PRUNED for name in ("start_update", "weights")},
    "averaging.decay": Need("with averaging.kind ema", lambda p: p.averaging.kind == "ema", is_refused=True),
    **{f"averaging.{name}": _AVERAGED for name in ("start_update", "every_updates", "export")},
    "data.test_data": _READERS,
    "speed.fusions_off": Need("with speed.fuse", lambda p: p.speed.fuse),
    "distributed.ranks": Need("with distributed.layout auto", lambda p: p.distributed.layout == "auto"),
    "head.num_classes": Need("with loss.prediction", lambda p: p.loss.prediction is not None, is_refused=True),
    "distributed.zero_stage": _REPLICAS,
    "distributed.enable_adasum": _READERS,
    "frozen_weights.block_size": Need(
        "with frozen_weights.dtype int8, int4 or nf4", lambda p: p.frozen_weights.dtype in QUANTIZED_DTYPES
    ),
    **{f"distributed.{name}": _LOCAL for name in FIELDS[1:]},
    "distributed.reduction_type": _REDUCED,
    "distributed.synchronize_batch_norm": _REDUCED,
    "distributed.pipeline_schedule": _PIPELINE,
    "distributed.use_nccl": _PROCESSES,
    "distributed.timeout_seconds": _PROCESSES,
    "distributed.start_timeout_seconds": _PROCESSES,
    "recompute.segments": _FLAGS_DECIDE,
    "recompute.attention": Need(
        "without recompute.segments, which recomputes attention too, and without recompute.memory_budget",
        lambda p: not p.recompute.segments and p.recompute.memory_budget is None,
    ),
    "recompute.number_recompute_layers": Need(
        "with recompute.segments or recompute.attention, whose layers it limits, and without recompute.memory_budget",
        lambda p: (p.recompute.segments or p.recompute.attention) and p.recompute.memory_budget is None,
        is_refused=True,
    ),
    "checkpoint.max_num_checkpoints": _CHECKPOINTS,
    "distributed.slow_rank_period": _PROCESSES,
    "distributed.slow_rank_ratio": _PROCESSES,
    "machine.check_computation_period": _WHOLE_REPLICAS,
    "checkpoint.blocking": _CHECKPOINTS,
    "checkpoint.memory_dir": Need(
        "with checkpoint.memory_period_updates", lambda p: p.checkpoint.memory_period_updates > 0
    ),
    "checkpoint.if_damaged": _CHECKPOINTS,
    "checkpoint.on_sigusr1": _CHECKPOINTS,
    "checkpoint.grace_seconds": _CHECKPOINTS,
    "on_bad_loss.spike_window": _SPIKES,
    "on_bad_loss.max_rollbacks": _SPIKES,
    "early_stopping.metric": _COMPARED,
    "early_stopping.mode": _COMPARED,
    "early_stopping.min_delta": _COMPARED,
    **{f"wandb.{name}": _WANDB for name in ("entity", "name", "mode")},
    **{f"mlflow.{name}": _MLFLOW for name in ("tracking_uri", "name")},
    **{f"aim.{name}": _AIM for name in ("repo", "name")},
    "profiler.trace_dir": _PROFILED,
    "profiler.top_nodes": _PROFILED,
}
"""`section.field` -> what it needs. Fields that others refuse by themselves are in `checks`."""


def fields_without_effect(parameters: Parameters, refused: bool) -> list[str]:
    """One sentence for each field that is set and has no effect.

    Args:
        parameters: of a round.
        refused: those for which a run is refused, or those that only a note reports.
    """
    found = []
    for field, need in NEEDS.items():
        value = _set_value(parameters, field)
        if value is not None and need.is_refused is refused and not need.is_met(parameters):
            shown = str(value).lower() if isinstance(value, bool) else f"{value}"
            found.append(f"{field} is {shown}, but it has an effect only {need.text}. Change that, or remove {field}.")
    return found


def _set_value(parameters: Parameters, field: str) -> Any:
    """The value of a field that is not its default; None: it is."""
    section, name = field.split(".")
    held = getattr(parameters, section)
    one = next(one for one in dataclasses.fields(held) if one.name == name)
    default = one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
    value = getattr(held, name)
    return None if value == default else value
