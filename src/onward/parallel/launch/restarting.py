"""Restarts: after which ends of its workers `onward train` starts them again, how often, and with which micro-batch.

What counts is progress: a run that saves a new checkpoint between two failures may fail any number of times, one that
does not is given up after `distributed.max_restarts`, and at once where the same error comes back at the same update.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from onward.parallel.watch.cause import Cause

LARGEST_BATCH = "ONWARD_LARGEST_BATCH"
"""Environment variable of workers: no micro-batch may have more samples, since memory ran out with more."""
RESTARTED_AFTER = "ONWARD_RESTARTED_AFTER"
"""Environment variable of workers: what ended those before them, for the log of the run."""
PAUSE_SECONDS = 1.0
"""Before a restart, times the number of restarts without progress: the machine may need a moment."""

MISTAKE, INTERRUPTED = 2, 3


@dataclass(frozen=True)
class LaunchEnd:
    """How a launch of workers ended.

    Attributes:
        exit_code: of all of them.
        cause: of a failure, where it is known.
        was_asked: somebody sent a signal that asks to stop.
    """

    exit_code: int
    cause: Cause | None = None
    was_asked: bool = False


@dataclass(kw_only=True)
class Restarts:
    """Decides after each launch whether there is another one.

    Attributes:
        most: restarts without a new checkpoint in between.
        newest_checkpoint: the name of the newest complete one; None: there is none.
        smaller_batches: after memory ran out with micro-batches of so many samples: the sizes to continue with, the
            smallest first; None: they stay as they are.
        largest_batch: no micro-batch may have more samples from now on.
    """

    most: int
    newest_checkpoint: Callable[[], str | None]
    smaller_batches: Callable[[int | None], Sequence[int]] | None = None
    largest_batch: int | None = None
    _without_progress: int = 0
    _last: tuple[str | None, Cause | None] | None = field(default=None)

    def next(self, end: LaunchEnd) -> tuple[bool, str]:
        """Whether to start again after an end, and what to say; nothing where the end was none to talk about."""
        is_memory = end.cause is not None and end.cause.kind == "out of memory"
        # The user's own mistake repeats itself; a node that memory did not suffice for is shown as one.
        is_final = end.exit_code in (0, INTERRUPTED) or (
            end.exit_code == MISTAKE and not (is_memory and self.smaller_batches is not None)
        )
        if is_final or end.was_asked or not self.most:
            return False, ""
        checkpoint = self.newest_checkpoint()
        before, self._last = self._last, (checkpoint, end.cause)
        if before is not None and before[0] != checkpoint:
            self._without_progress = 0
        self._without_progress += 1
        where = "from the beginning" if checkpoint is None else f"from {checkpoint}"
        if is_memory and self.smaller_batches is not None:
            assert end.cause is not None
            return self._with_smaller_batch(end.cause.batch_size, where)
        if self._without_progress > self.most:
            since = "no checkpoint was saved" if checkpoint is None else f"no checkpoint was saved after {checkpoint}"
            return False, (
                f"not restarted: {self.most} restart{'s' if self.most > 1 else ''} (distributed.max_restarts) did "
                f"not help, {since}. Fix the cause above; the same command then resumes."
            )
        if before is not None and before == self._last and end.cause is not None and end.cause.kind == "error":
            return False, (
                f"not restarted: the same error occurred again at the same point ({where}, then {end.cause.updates} "
                "updates). Fix the cause above; the same command then resumes."
            )
        return True, f"restarting all ranks {where} (restart {self._without_progress} of {self.most} without progress)."

    def _with_smaller_batch(self, batch_size: int | None, where: str) -> tuple[bool, str]:
        assert self.smaller_batches is not None
        tried = batch_size if batch_size is not None else self.largest_batch
        sizes = self.smaller_batches(tried)
        if not sizes:
            return False, (
                "not restarted: memory ran out, and no smaller micro-batch is possible. Save memory by recompute, "
                "mixed_precision or distributed.zero_stage, or use more ranks."
            )
        self.largest_batch, self._without_progress = sizes[-1], 0
        of = "" if tried is None else f" instead of {tried}"
        return True, (
            f"restarting all ranks {where} with micro-batches of {self.largest_batch} samples{of}; an update has as "
            "many samples as before."
        )

    @property
    def pauses(self) -> int:
        """How many restarts there were since the last progress."""
        return self._without_progress

    def environment(self, cause: str | None) -> dict[str, str]:
        """What the next workers are given."""
        given = {} if self.largest_batch is None else {LARGEST_BATCH: str(self.largest_batch)}
        return given if cause is None else {**given, RESTARTED_AFTER: cause}


def launch_until_done(launch: Callable[[Mapping[str, str]], LaunchEnd], restarts: Restarts) -> int:
    """Launches workers until they are done or are not to be started again; returns their exit code.

    Args:
        launch: starts the workers with further environment variables and waits for them.
        restarts: decides.
    """
    told: str | None = None
    while True:
        end = launch(restarts.environment(told))
        again, words = restarts.next(end)
        if words:
            sys.stderr.write(f"onward train: {words}\n")
            sys.stderr.flush()
        if not again:
            return end.exit_code
        told = f"{end.cause.first_line if end.cause else f'exit code {end.exit_code}'} Now {words}"
        time.sleep(PAUSE_SECONDS * restarts.pauses)
