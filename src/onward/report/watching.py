"""Several watchers as one: every event goes to each of them, and the failure of one costs the others nothing.

The first loss that is not finite is told in a message beside it, with what to do.
`make_watchers` builds the usual set of a run: console, TensorBoard and the file of metrics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from onward.engine.reports import CheckpointReport, EvaluationReport, RunSummary, StepReport, Watcher
from onward.errors import OnwardError


class Watchers:
    """Forwards every event to all its watchers; itself a `Watcher`.

    A watcher that raises is closed and left out from then on: training is worth more than its record. The others
    are told with `on_message`, and the exception stays in `failures`, for the runner to raise once all is saved.
    """

    def __init__(self, watchers: Iterable[Watcher] = ()) -> None:
        self._watchers: list[Watcher] = list(watchers)
        self.failures: list[Exception] = []
        self._said_not_finite = False

    @property
    def watchers(self) -> tuple[Watcher, ...]:
        """Those that still watch."""
        return tuple(self._watchers)

    def add(self, watchers: Iterable[Watcher]) -> None:
        """Lets further watchers watch from now on."""
        self._watchers.extend(watchers)

    def on_step(self, report: StepReport) -> None:
        """Forwards, and says what to do where the loss is not finite any more, once."""
        self._forward(lambda watcher: watcher.on_step(report))
        if not math.isfinite(report.loss) and not self._said_not_finite:
            self._said_not_finite = True
            self.on_message(_not_finite(report))

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Forwards."""
        self._forward(lambda watcher: watcher.on_evaluation(report))

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """Forwards."""
        self._forward(lambda watcher: watcher.on_checkpoint(report))

    def on_message(self, text: str) -> None:
        """Forwards."""
        self._forward(lambda watcher: watcher.on_message(text))

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
        for watcher, failure in failed.items():
            self._watchers.remove(watcher)
            self.failures.append(failure)
            try:
                watcher.close()
            except Exception as error:
                failure.add_note(f"closing it failed too: {_describe(error)}")
        # Told after the removal of all that failed; a message may make a further one fail, which is then told too.
        for watcher, failure in failed.items():
            self.on_message(f"{type(watcher).__name__} stops, training goes on: {_describe(failure)}")


def make_watchers(
    *,
    console: Watcher | None = None,
    metrics_path: str | Path | None = None,
    tensorboard_dir: str | Path | None = None,
    scalar_names: Sequence[str] = (),
    histogram_names: Sequence[str] = (),
    norm_names: Sequence[str] = (),
    resumed_update: int | None = None,
) -> Watchers:
    """The watchers of a run, for the one rank that reports.

    Args:
        console: the console, made by the caller because it is wanted before a run's directories are known.
        metrics_path: where `metrics.jsonl` goes; None for none.
        tensorboard_dir: where TensorBoard's event files go; None for none.
        scalar_names, histogram_names, norm_names: see `TensorBoardWatcher`.
        resumed_update: the update of the checkpoint from which the run goes on; None for a fresh run.

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

            watchers.append(
                TensorBoardWatcher(tensorboard_dir, scalar_names, histogram_names, norm_names, resumed_update)
            )
    except BaseException:
        for watcher in watchers[0 if console is None else 1 :]:
            watcher.close()
        raise
    return Watchers(watchers)


def _not_finite(report: StepReport) -> str:
    return (
        f"the loss is {report.loss} at step {report.step}: of {report.update:,} updates so far, "
        f"{report.skipped_updates:,} were skipped because of gradients that are not finite; the weights stayed as they "
        "were. If it is some updates now and then, samples are to blame: look for NaN and infinity in the data. If it "
        "is all of them from some step on, training has diverged: lower learning_rate.initial_lr or set "
        "optimizer.max_norm_clip, and begin anew or go on from a checkpoint before that step."
    )


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, OnwardError) else f"{type(error).__name__}: {error}"
