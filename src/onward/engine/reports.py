"""What the loop tells the world: plain frozen values, one kind per event. Whoever watches a run reads only these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Protocol

import torch

from onward.tables import html_fields


@dataclass(frozen=True)
class _Shown:
    """A report that notebooks show as a table of its fields."""

    def _repr_html_(self) -> str:
        values = ((one.name, getattr(self, one.name)) for one in fields(self))
        rows = [(name, _text(value)) for name, value in values if not _is_large(value)]
        return html_fields(type(self).__name__, rows)


def _is_large(value: object) -> bool:
    return isinstance(value, torch.Tensor) or (
        isinstance(value, Mapping) and any(isinstance(one, torch.Tensor) for one in value.values())
    )


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(one)}" for name, one in value.items()) or "none"
    return f"{value:.6g}" if isinstance(value, float) else "none" if value is None else str(value)


@dataclass(frozen=True, kw_only=True)
class StepReport(_Shown):
    """One weight update that is to be displayed.

    Attributes:
        step: forward/backward passes done in this round.
        num_train_steps: steps of this round.
        update: weight updates done over all rounds, skipped ones included.
        round: rounds finished before this one.
        epoch: passes over the training data finished before this step's batch.
        loss: mean over the micro-batches of the updates since the last report, unscaled.
        learning_rate: of the last update.
        gradient_norm: global L2 norm of the last update before clipping, unscaled; not finite where it overflowed.
        loss_scale: after the last update; None without loss scaling.
        skipped_updates: updates skipped over all rounds because a gradient was not finite.
        samples: training samples consumed in this round.
        samples_per_second, tokens_per_second: since the last report; tokens None where a sample is not a sequence.
        seconds: training time since the last report.
        data_wait_seconds: part of these seconds that was spent waiting for batches.
        seconds_left: estimate until the end of the round.
        mfu: model FLOPs utilization since the last report, 1.0 for all of it (`onward.engine.utilization`); None where
            it was not measured yet or cannot be known.
        peak_memory_bytes: of this process since it was started: what torch allocated on the GPU, or all it held.
        tensors: values asked for by name (`scalar_names`, `histogram_names`, `norm_names`), detached;
            a weight under its own name, its gradient under `<weight>_grad`.
        module_paths: of the weights and gradients among them, by which they may have been asked for.
    """

    step: int
    num_train_steps: int
    update: int
    round: int
    epoch: int
    loss: float
    learning_rate: float
    gradient_norm: float
    loss_scale: float | None
    skipped_updates: int
    samples: int
    samples_per_second: float
    tokens_per_second: float | None
    seconds: float
    data_wait_seconds: float
    seconds_left: float
    mfu: float | None = None
    peak_memory_bytes: int | None = None
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    module_paths: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class UpdateReport(_Shown):
    """Any weight update, displayed or not. Nothing is read from the device until it is asked for.

    Attributes:
        step, num_train_steps, update, round, epoch, learning_rate, samples: as in `StepReport`.
        device_loss: mean over this rank's micro-batches of the update, unscaled, on the device.
        device_gradient_norm: as `StepReport.gradient_norm`, on the device.
    """

    step: int
    num_train_steps: int
    update: int
    round: int
    epoch: int
    learning_rate: float
    samples: int
    device_loss: torch.Tensor
    device_gradient_norm: torch.Tensor

    @property
    def loss(self) -> float:
        """`device_loss` as a number; waits for the device."""
        return float(self.device_loss)

    @property
    def gradient_norm(self) -> float:
        """`device_gradient_norm` as a number; waits for the device."""
        return float(self.device_gradient_norm)


@dataclass(frozen=True)
class EpochReport(_Shown):
    """A pass over the training data that is finished.

    Attributes:
        epoch: which, counted from 0.
        step, update, round: done by then, as in `StepReport`.
    """

    epoch: int
    step: int
    update: int
    round: int


@dataclass(frozen=True, kw_only=True)
class RunStart(_Shown):
    """What a round begins with, or resumes with.

    Attributes:
        round: rounds finished before this one.
        step: steps of this round that are done already: 0, or those of the checkpoint.
        num_train_steps: steps of this round.
        update: weight updates done over all rounds.
        batch_size, gradient_accumulation_steps: of this round.
        replicas: processes that train on other samples at the same time.
    """

    round: int
    step: int
    num_train_steps: int
    update: int
    batch_size: int
    gradient_accumulation_steps: int
    replicas: int


@dataclass(frozen=True, kw_only=True)
class EvaluationReport(_Shown):
    """One pass over the entire test set: means over its samples.

    Attributes:
        step, update, round: when it was made, as in `StepReport`.
        metrics: name -> mean over the samples; always holds "loss"; "accuracy" where there are class labels.
        samples: test samples seen, each once.
        seconds: how long it took.
        stale_updates: those of `update` that the weights lack: of workers of local SGD, since they synchronized last.
    """

    step: int
    update: int
    round: int
    metrics: Mapping[str, float]
    samples: int
    seconds: float
    stale_updates: int = 0

    @property
    def weights_update(self) -> int:
        """The update of which the weights are that were evaluated."""
        return self.update - self.stale_updates


@dataclass(frozen=True)
class CheckpointReport(_Shown):
    """A checkpoint that was started: its directory, and how long training stood still for it."""

    step: int
    update: int
    path: str
    stall_seconds: float


@dataclass(frozen=True, kw_only=True)
class RollBackReport(_Shown):
    """A spike: training returned to a checkpoint, and leaves out the data of the update where it happened.

    Attributes:
        update: the one that was a spike.
        cause: "loss" or "gradient norm".
        value: of it.
        deviations: robust standard deviations above the median of the last updates.
        samples: what the update read on this rank: files and samples.
        returned_to: update of the checkpoint; training continues after it.
        path: of the checkpoint.
    """

    update: int
    cause: str
    value: float
    deviations: float
    samples: str
    returned_to: int
    path: str


@dataclass(frozen=True, kw_only=True)
class RunSummary(_Shown):
    """What `TrainingRunner.run` returns: one round, from its first to its last step.

    Attributes:
        round: the round that ended (0 is the first).
        steps, updates, skipped_updates, samples: done in this call.
        steps_before, updates_before, samples_before: done of this round before this call, by the run that was resumed.
        batch_size, gradient_accumulation_steps: as asked.
        first_loss, last_loss: means over the first and last display window; None where no step was done.
        first_loss_of_round: the first finite one that was displayed in this round, also before a resume; None: unknown.
        seconds: wall clock of the entire call; train_seconds: without evaluation and checkpoints.
        samples_per_second: over `train_seconds`; stable_samples_per_second: over the last 128 steps at
            most, without the first.
        metrics: of the last evaluation; empty where none was made.
        checkpoint: the last checkpoint's directory, or None.
        stopped: why a callback ended the round before its last step; None: none did.
        mfu: at `stable_samples_per_second`; peak_memory_bytes: at the end; both as in `StepReport`.
    """

    round: int
    steps: int
    updates: int
    skipped_updates: int
    samples: int
    batch_size: int
    gradient_accumulation_steps: int
    first_loss: float | None
    last_loss: float | None
    seconds: float
    train_seconds: float
    samples_per_second: float
    stable_samples_per_second: float
    metrics: Mapping[str, float]
    checkpoint: str | None
    stopped: str | None = None
    mfu: float | None = None
    peak_memory_bytes: int | None = None
    steps_before: int = 0
    updates_before: int = 0
    samples_before: int = 0
    first_loss_of_round: float | None = None


class Watcher(Protocol):
    """Someone who watches a run: the console, TensorBoard, a file of metrics.

    A `Callback` (`onward.engine.callbacks`) is a watcher that is notified of more, and steers.
    """

    def on_step(self, report: StepReport) -> None:
        """Called for every displayed update."""

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Called after every evaluation."""

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """Called after a checkpoint was started."""

    def on_message(self, text: str) -> None:
        """Called with one sentence for the user: a resume, a skipped file, a changed weight."""

    def on_end(self, summary: RunSummary) -> None:
        """Called when a round ends."""

    def close(self) -> None:
        """Called once, at the very end."""
