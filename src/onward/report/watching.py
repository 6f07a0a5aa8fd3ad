"""Several watchers as one: every event goes to each of them, and the failure of one costs the others nothing.

Callbacks, which are watchers that steer, are notified of more; unless they say otherwise, their failure ends the run.
The first loss that is not finite is reported in a message next to it, with what to do. Messages go to the logger
"onward", too.
`make_watchers` builds the usual set of a run: console, TensorBoard and the file of metrics.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from onward.data.batches import Batch
from onward.engine.callbacks import Callback, Control
from onward.engine.loop import StepDone
from onward.engine.reports import (
    CheckpointReport,
    EpochReport,
    EvaluationReport,
    RollBackReport,
    RunStart,
    RunSummary,
    StepReport,
    UpdateReport,
    Watcher,
)
from onward.engine.state import TrainState
from onward.errors import OnwardError, ParametersError

_LOGGER = logging.getLogger("onward")
"""Carries every message of a run, at the level that `Environment.log_level` sets: what `logging` is configured for."""
_LOGGER.addHandler(logging.NullHandler())


class Watchers:
    """Forwards every event to all its watchers; itself a `Watcher`.

    A watcher that raises is closed and left out from then on: training is worth more than its record. The others
    are reported with `on_message`, and the exception stays in `failures`, for the runner to raise once all is saved.
    A `Callback` that raises ends the run instead, unless its `stop_on_error` is false.
    """

    def __init__(self, watchers: Iterable[Watcher] = ()) -> None:
        self._watchers: list[Watcher] = list(watchers)
        self.failures: list[Exception] = []
        self._said_not_finite = self._is_in_phase = False
        self._states: dict[str, Any] = {}

    @property
    def watchers(self) -> tuple[Watcher, ...]:
        """Those that still watch."""
        return tuple(self._watchers)

    def add(self, watchers: Iterable[Watcher]) -> None:
        """Lets further watchers watch from now on."""
        self._watchers.extend(watchers)
        self._hand_out_states()

    def remove(self, watchers: Iterable[Watcher]) -> None:
        """Lets watchers watch no longer; they are not closed."""
        leaving = list(watchers)
        self._watchers = [watcher for watcher in self._watchers if watcher not in leaving]

    @property
    def callbacks(self) -> tuple[Callback, ...]:
        """Those that steer."""
        return tuple(watcher for watcher in self._watchers if isinstance(watcher, Callback))

    # ------------------------------------------------------------------ what callbacks are notified of

    def on_run_start(self, start: RunStart, control: Control) -> None:
        """Gives callbacks what they ask with, and forwards."""
        for callback in self.callbacks:
            callback.control = control
        self._forward(lambda watcher: watcher.on_run_start(start) if isinstance(watcher, Callback) else None)

    @property
    def inspects_batches(self) -> bool:
        """Whether a callback has an `on_batch`."""
        return any(type(callback).on_batch is not Callback.on_batch for callback in self.callbacks)

    def on_batch(self, batch: Batch) -> None:
        """Forwards."""
        self._forward(lambda watcher: watcher.on_batch(batch) if isinstance(watcher, Callback) else None)

    def on_update(self, report: UpdateReport) -> None:
        """Forwards."""
        self._forward(lambda watcher: watcher.on_update(report) if isinstance(watcher, Callback) else None)

    def on_epoch_end(self, report: EpochReport) -> None:
        """Forwards."""
        self._forward(lambda watcher: watcher.on_epoch_end(report) if isinstance(watcher, Callback) else None)

    def on_step_done(self, done: StepDone, state: TrainState) -> None:
        """Forwards what a step of the loop was: a weight update, one that is displayed, the end of an epoch."""
        if self._is_in_phase:
            self.on_phase(None)
        if done.update is not None:
            self.on_update(done.update)
        if done.report is not None:
            self.on_step(done.report)
        counters, epoch = state.counters, state.cursor.epoch
        for finished in range(epoch - done.epochs, epoch):
            self.on_epoch_end(EpochReport(finished, counters.step, counters.update, counters.round))

    def on_exception(self, error: BaseException) -> None:
        """Forwards; what goes wrong there is noted at the error and hides nothing."""
        for callback in self.callbacks:
            try:
                callback.on_exception(error)
            except Exception as second:
                error.add_note(f"{type(callback).__name__}.on_exception failed too: {_describe(second)}")

    def states(self) -> dict[str, Any]:
        """What a checkpoint keeps of the callbacks, by their classes' names.

        Raises:
            ParametersError: a callback's `state_dict` cannot be written as JSON.
        """
        found = {}
        for name, callback in self._named_callbacks():
            state = dict(callback.state_dict())
            try:
                json.dumps(state)
            except (TypeError, ValueError) as error:
                raise ParametersError(
                    f"{type(callback).__name__}.state_dict() returned what JSON cannot hold: {error}. Return numbers, "
                    "strings, lists and dictionaries; convert tensors with .item() or .tolist()."
                ) from error
            if state:
                found[name] = state
        return {**self._states, **found}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Gives callbacks what a checkpoint kept of them; those that are added later get theirs then."""
        self._states = dict(states)
        self._hand_out_states()

    def state_of(self, name: str) -> Mapping[str, Any]:
        """What the checkpoint kept of a callback that is not added yet, by its class's name; {}: nothing."""
        return dict(self._states.get(name, {}))

    def _hand_out_states(self) -> None:
        for name, callback in self._named_callbacks() if self._states else ():
            if name in self._states:
                callback.load_state_dict(self._states.pop(name))

    def _named_callbacks(self) -> list[tuple[str, Callback]]:
        seen: Counter[str] = Counter()
        named = []
        for callback in self.callbacks:
            name = type(callback).__name__
            seen[name] += 1
            named.append((name if seen[name] == 1 else f"{name} {seen[name]}", callback))
        return named

    def on_phase(self, name: str | None) -> None:
        """What the run does from now on while it has nothing to report ("reading the model"); None: that is over.

        Forwarded to watchers that have an `on_phase`; others need none.
        """
        self._is_in_phase = name is not None
        for watcher in self._watchers:
            begin = getattr(watcher, "on_phase", None)
            if begin is not None:
                begin(name)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase that is over when the block is left, however that comes about."""
        self.on_phase(name)
        try:
            yield
        finally:
            self.on_phase(None)

    def announced(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches of a round; waiting for the first and computing its step are phases."""
        self.on_phase("reading the first batch")
        first = next(batches, None)
        self.on_phase("computing the first step, for which code is specialized or compiled")
        if first is not None:
            yield first
            yield from batches

    # ------------------------------------------------------------------ what every watcher is notified of

    def on_step(self, report: StepReport) -> None:
        """Forwards, and says what to do where the loss is not finite any more, once."""
        self._forward(lambda watcher: watcher.on_step(report))
        _LOGGER.debug("step %d of %d: loss %.6g", report.step, report.num_train_steps, report.loss)
        if not math.isfinite(report.loss) and not self._said_not_finite:
            self._said_not_finite = True
            self._report(_not_finite(report), logging.WARNING)

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Forwards."""
        self._forward(lambda watcher: watcher.on_evaluation(report))
        found = ", ".join(f"{name} {value:.6g}" for name, value in report.metrics.items())
        _LOGGER.info("evaluation at step %d: %s", report.step, found)

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """Forwards."""
        self._forward(lambda watcher: watcher.on_checkpoint(report))
        _LOGGER.info("checkpoint at step %d: %s", report.step, report.path)

    def on_roll_back(self, report: RollBackReport) -> None:
        """Forwards to watchers that have an `on_roll_back`; others need none."""
        self._forward(lambda watcher: getattr(watcher, "on_roll_back", lambda _: None)(report))
        _LOGGER.warning("returned from update %d to %d: %s", report.update, report.returned_to, report.path)

    def on_message(self, text: str) -> None:
        """Forwards."""
        self._report(text, logging.INFO)

    def _report(self, text: str, level: int) -> None:
        self._forward(lambda watcher: watcher.on_message(text))
        _LOGGER.log(level, "%s", text)

    def on_messages(self, texts: Iterable[str]) -> None:
        """Forwards each."""
        for text in texts:
            self.on_message(text)

    def on_end(self, summary: RunSummary) -> None:
        """Forwards."""
        self._forward(lambda watcher: watcher.on_end(summary))

    def close(self) -> None:
        """Closes all, each whatever befell the ones before."""
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            try:
                watcher.close()
            except Exception as error:
                self.failures.append(error)

    def raise_failures(self) -> None:
        """Raises the first failure of a watcher, if there was any, the further ones as notes.

        Raises:
            Exception: what the watcher raised; a `StorageError` for a full disk.
        """
        if not self.failures:
            return
        first, *others = self.failures
        for other in others:
            first.add_note(f"also: {_describe(other)}")
        raise first

    def _forward(self, event: Callable[[Watcher], None]) -> None:
        failed: dict[Watcher, Exception] = {}
        for watcher in self._watchers:
            try:
                event(watcher)
            except Exception as error:
                failed[watcher] = error
        _raise_of_callbacks(failed)
        for watcher, failure in failed.items():
            self._watchers.remove(watcher)
            if not isinstance(watcher, Callback):
                self.failures.append(failure)
            try:
                watcher.close()
            except Exception as error:
                if _describe(error) != _describe(failure):
                    failure.add_note(f"closing it failed too: {_describe(error)}")
        # Told after the removal of all that failed; a message may make a further one fail, which is then told too.
        for watcher, failure in failed.items():
            text = f"{type(watcher).__name__} stops, training goes on: {_describe(failure)}"
            self._report(text, logging.WARNING)


def _raise_of_callbacks(failed: Mapping[Watcher, Exception]) -> None:
    """Raises the first failure that is to end the run, the others as notes."""
    ending = {watcher: error for watcher, error in failed.items() if isinstance(watcher, Callback)}
    ending = {callback: error for callback, error in ending.items() if callback.stop_on_error}
    for callback, error in ending.items():
        error.add_note(
            f"Raised in the callback {type(callback).__name__}; it ends the run. Set stop_on_error = False in its "
            "class to report such an error and continue without the callback."
        )
        for other in failed.values():
            if other is not error:
                error.add_note(f"also: {_describe(other)}")
        raise error


def make_watchers(
    *,
    console: Watcher | None = None,
    metrics_path: str | Path | None = None,
    tensorboard_dir: str | Path | None = None,
    scalar_names: Sequence[str] = (),
    histogram_names: Sequence[str] = (),
    norm_names: Sequence[str] = (),
    resumed_update: int | None = None,
    texts: Mapping[str, str] | None = None,
    hyperparameters: Mapping[str, int | float | str | bool] | None = None,
) -> Watchers:
    """The watchers of a run, for the one rank that reports.

    Args:
        console: the console, made by the caller because it is wanted before a run's directories are known.
        metrics_path: where `metrics.jsonl` goes; None for none.
        tensorboard_dir: where TensorBoard's event files go; None for none.
        scalar_names, histogram_names, norm_names: see `TensorBoardWatcher`.
        resumed_update: the update of the checkpoint from which the run resumes; None for a fresh run.
        texts, hyperparameters: of the run, for TensorBoard.

    Raises:
        StorageError: a file cannot be made.
    """
    watchers: list[Watcher] = [] if console is None else [console]
    try:
        if metrics_path is not None:
            from onward.report.metrics_file import MetricsFile

            watchers.append(MetricsFile(metrics_path, resumed_update))
        if tensorboard_dir is not None:
            # Imported when asked for: TensorBoard takes half a second.
            from onward.report.tensorboard import TensorBoardWatcher

            board = TensorBoardWatcher(tensorboard_dir, scalar_names, histogram_names, norm_names, resumed_update)
            watchers.append(board)
            board.describe(texts or {}, hyperparameters or {})
    except BaseException:
        for watcher in watchers[0 if console is None else 1 :]:
            watcher.close()
        raise
    return Watchers(watchers)


def _not_finite(report: StepReport) -> str:
    return (
        f"the loss is {report.loss} at step {report.step}; {report.skipped_updates:,} of {report.update:,} updates so "
        "far were skipped, because their gradients are not finite. The weights are unchanged by them. If single "
        "updates are skipped, look for NaN and infinite values in the data. If all are skipped from some step on, "
        "training has diverged: lower learning_rate.initial_lr or set optimizer.max_norm_clip, and start again or "
        "resume from an earlier checkpoint."
    )


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, OnwardError) else f"{type(error).__name__}: {error}"
