"""Runs in which weight updates do not succeed, because gradients are not finite, end as failures with what to do."""

from __future__ import annotations

from onward.engine.reports import StepReport
from onward.engine.state import Counters, TrainState
from onward.errors import ParametersError

MOST_IN_A_ROW = 100
"""Updates skipped one after the other: a dynamic loss scale has reached its minimum long before."""


class SkippedUpdates:
    """Watches the skipped updates of one round.

    Args:
        state: of the run, at the beginning of the round.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        counters = state.counters
        self._begin = self._last = (counters.update, counters.skipped_updates)
        self._in_a_row = 0

    def after_report(self, report: StepReport | None) -> None:
        """Looks at what was skipped since the last report, where there is one.

        Raises:
            ParametersError: too many updates in a row were skipped.
        """
        if report is None:
            return
        now = (report.update, report.skipped_updates)
        updates, skipped = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        self._in_a_row = self._in_a_row + updates if updates == skipped else 0
        if self._in_a_row >= MOST_IN_A_ROW:
            raise ParametersError(
                f"the last {self._in_a_row} weight updates were skipped, since their gradients were not finite. "
                f"{_what_to_do(self._state)}"
            )

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


def _what_to_do(state: TrainState) -> str:
    scale = state.loss_scale
    if scale is not None and not scale.dynamic:
        return (
            f"mixed_precision.loss_scale is {scale.scale:g}, at which gradients overflow. Set it to 0 for dynamic "
            "loss scaling or to a smaller value, or set use_bfloat16: true."
        )
    where = "" if scale is None else f" at a loss scale of {scale.scale:g}"
    return (
        f"The loss or a gradient is infinite or NaN{where}. Look for such values in the data and in the "
        "model's weights, and lower learning_rate.initial_lr or set optimizer.max_norm_clip."
    )
