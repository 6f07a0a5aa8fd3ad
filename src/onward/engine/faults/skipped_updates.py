"""Runs in which weight updates do not succeed, because losses, gradients or batch statistics are not finite, end as
failures that name the files and samples, with what to do."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from onward.data.batches import Origin
from onward.data.shard import load_shard
from onward.engine.loop import StepDone
from onward.engine.state import Counters, TrainState
from onward.engine.steps import skips_on_device
from onward.errors import DataError, ParametersError
from onward.parallel.agreement import gather_texts
from onward.spelling import shortened

NAMED_UPDATES = 2
"""The batches of so many of the last skipped updates are named."""

_NAMED_SAMPLES = 16


class SkippedUpdates:
    """Watches the skipped updates of one round.

    Args:
        state: of the run, at the beginning of the round.
        most_in_a_row: as `on_bad_loss.skip`.
        notify: called with the first of several.
    """

    def __init__(self, state: TrainState, most_in_a_row: int, notify: Callable[[str], None]) -> None:
        self._state = state
        self._most = most_in_a_row
        self._notify = notify
        counters = state.counters
        self._begin = self._last = (counters.update, counters.skipped_updates)
        self._in_a_row = self._counted = 0
        self._micro_batches: list[Origin] = []
        self._updates: deque[tuple[int, list[Origin], bool]] = deque(maxlen=NAMED_UPDATES)

    def after_step(self, done: StepDone) -> None:
        """Looks whether the update was skipped; where only the device knows, when there is a report.

        Raises:
            ParametersError: too many updates in a row were skipped; on all ranks.
        """
        self._micro_batches.append(done.origin)
        if done.update is None:
            return
        batches, self._micro_batches = self._micro_batches, []
        if skips_on_device(self._state) and done.report is None:
            return
        counters = self._state.counters
        now = (counters.update, counters.skipped_updates)
        updates, skipped = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        if updates != skipped:
            self._in_a_row = self._counted = 0
            return
        self._in_a_row += updates
        scale = self._state.loss_scale
        is_searching = scale is not None and scale.dynamic and scale.scale > scale.minimum
        self._counted += 0 if is_searching else updates
        self._updates.append((done.update.update, batches, not np.isfinite(done.update.loss)))
        if self._counted == updates and not is_searching:
            self._notify(
                f"update {done.update.update} is skipped: its loss, gradient or batch statistics are not finite "
                f"({_describe(batches, 4)})."
            )
        if self._counted > self._most:
            raise ParametersError(
                f"the last {self._in_a_row} weight updates were skipped, since their losses, gradients or batch "
                f"statistics were not finite; on_bad_loss.skip allows {self._most} in a row. {self._who()}"
                f"{_what_to_do(self._state)}"
            )

    def _who(self) -> str:
        """The batches of the last updates, of the replicas whose own losses are not finite, or else of all."""
        is_own = any(is_bad for _, _, is_bad in self._updates)
        lines = [f"update {number} read {_describe(batches, _NAMED_SAMPLES)}" for number, batches, _ in self._updates]
        place = self._state.mesh.place
        is_first = place.horizontal == place.pipeline == self._state.mesh.topology.context(place) == 0
        found = "; ".join(lines) + "".join(f"; {text}" for text in _not_finite(self._updates))
        texts = gather_texts(
            self._state.mesh, f"{int(is_own)}{self._state.mesh.reader} {found}" if is_first and lines else ""
        )
        chosen = [text[1:] for text in texts if text.startswith("1")] or [text[1:] for text in texts if text]
        if self._state.mesh.topology.reader_count == 1:
            return "".join(f"{text.partition(' ')[2].capitalize()}. " for text in chosen[:1])
        return "".join(f"On replica {replica}, {text}. " for replica, _, text in (one.partition(" ") for one in chosen))

    def at_end(self) -> None:
        """Looks at the round.

        Raises:
            ParametersError: it had updates, and all were skipped.
        """
        counters = self._state.counters
        refuse_untrained(
            self._state, counters.update - self._begin[0], counters.skipped_updates - self._begin[1], "this round"
        )


def refuse_untrained(state: TrainState, updates: int, skipped: int, what: str) -> None:
    """Refuses to call something trained of which no weight update succeeded.

    Raises:
        ParametersError: there were updates, and all were skipped.
    """
    if 0 < updates == skipped:
        raise ParametersError(
            f"all {updates} weight updates of {what} were skipped, since their gradients were not finite: nothing was "
            f"trained. {_what_to_do(state)}"
        )


def refuse_untrained_run(state: TrainState) -> None:
    """`refuse_untrained` of all rounds until now."""
    counters: Counters = state.counters
    refuse_untrained(state, counters.update, counters.skipped_updates, "this run")


def _describe(batches: Sequence[Origin], most: int) -> str:
    """Files and samples of the micro-batches of an update."""
    numbers: dict[str, list[int]] = {}
    for path, rows in (part for batch in batches for part in batch):
        numbers.setdefault(path.name if isinstance(path, Path) else f"data in {path}", []).extend(map(int, rows))
    if not numbers:
        return "data of unknown origin"
    return ", ".join(f"{name}: {_listed(rows, most)}" for name, rows in numbers.items())


def describe_origin(batches: Sequence[Origin]) -> str:
    """Files and samples of the micro-batches of an update, as far as they fit into a message."""
    return _describe(batches, _NAMED_SAMPLES)


def _listed(rows: list[int], most: int) -> str:
    word = "sample" if len(rows) == 1 else "samples"
    return f"{word} {shortened(map(str, rows), most)}"


def _not_finite(updates: Sequence[tuple[int, list[Origin], bool]]) -> Iterator[str]:
    """The first value of the named samples that is not finite itself, as far as their files can be read again."""
    for path, rows in (part for _, batches, _ in updates for batch in batches for part in batch):
        if not isinstance(path, Path):
            continue
        with contextlib.suppress(DataError):
            for name, array in load_shard(path, {}).features.items():
                if array.dtype.kind == "f":
                    for row in map(int, rows):
                        if not np.isfinite(array[row]).all():
                            yield f"feature {name!r} of sample {row} of {path} holds values that are not finite"
                            return


def _what_to_do(state: TrainState) -> str:
    scale = state.loss_scale
    if scale is not None and not scale.dynamic:
        return (
            f"mixed_precision.loss_scale is {scale.scale:g}, at which gradients overflow. Set it to 0 for dynamic "
            "loss scaling or to a smaller value, or set use_bfloat16: true."
        )
    where = "" if scale is None else f" at a loss scale of {scale.scale:g}"
    return (
        f"A loss, a gradient or a batch statistic is infinite or NaN{where}. Look for such values in the data and in "
        "the model's weights, and lower learning_rate.initial_lr or set optimizer.max_norm_clip."
    )
