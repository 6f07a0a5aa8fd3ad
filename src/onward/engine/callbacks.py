"""Callbacks: watchers that also steer a run. `Callback` is what users derive from, `Control` what it asks with.

What is asked is done after the current weight update, and on all ranks alike (`onward.engine.steering`).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from onward.data.batches import Batch
from onward.engine.reports import (
    CheckpointReport,
    EpochReport,
    EvaluationReport,
    RollBackReport,
    RunStart,
    RunSummary,
    StepReport,
    UpdateReport,
)
from onward.errors import ParametersError
from onward.lowering.module import OnnxModule
from onward.optim.schedules import RateAdjustment
from onward.parameters import Parameters


class Control:
    """What a callback asks of the run; in a run of several ranks the requests of rank 0's callbacks count.

    Args:
        parameters: of the round.
        net: what is trained, as this process holds it.
        adjustment: of the learning rate, as it is now.
        can_evaluate: whether there are test data.

    Attributes:
        parameters, net: as above; changing the weights is allowed in `on_run_start` and `on_update`.
    """

    def __init__(
        self, parameters: Parameters, net: OnnxModule, adjustment: RateAdjustment, can_evaluate: bool = True
    ) -> None:
        self.parameters = parameters
        self.net = net
        self._can_evaluate = can_evaluate
        self._adjustment = adjustment
        self._stop_reason: str | None = None
        self._is_adjusted = self._evaluates = self._saves = False
        self._skips: bool | None = None

    def stop(self, reason: str) -> None:
        """Ends the round after the current weight update, as if it had no further steps.

        The state is saved, `on_end` is called, and `run` returns; `reason` is in the summary.
        """
        self._stop_reason = self._stop_reason or reason

    def set_learning_rate(self, rate: float | None) -> None:
        """Trains at this rate from the next update to the end of the round; None: the schedule applies again.

        Raises:
            ParametersError: the rate is negative or not finite.
        """
        if rate is not None and not (math.isfinite(rate) and rate >= 0):
            raise ParametersError(f"set_learning_rate({rate!r}): expected a number from 0, or None for the schedule.")
        self._adjustment = RateAdjustment(self._adjustment.scale, None if rate is None else float(rate))
        self._is_adjusted = True

    def scale_learning_rate(self, factor: float) -> None:
        """Multiplies the learning rate, scheduled or set, from the next update to the end of the round.

        Factors multiply: two calls with 0.5 leave a quarter.

        Raises:
            ParametersError: the factor is negative or not finite.
        """
        if not (math.isfinite(factor) and factor >= 0):
            raise ParametersError(f"scale_learning_rate({factor!r}): expected a number from 0.")
        self._adjustment = RateAdjustment(self._adjustment.scale * factor, self._adjustment.fixed)
        self._is_adjusted = True

    def skip_step(self) -> None:
        """Leaves out the batch that `on_batch` was given: the next one replaces it, and the step count does not change.

        Raises:
            ParametersError: it is called from another hook.
        """
        if self._skips is None:
            raise ParametersError(
                "skip_step() belongs in on_batch(batch), which is called before each step with the batch that is to be "
                "skipped. Store the decision in an attribute, and call skip_step() in on_batch."
            )
        self._skips = True

    def evaluate_now(self) -> None:
        """Evaluates after the current weight update; `on_evaluation` gets the report.

        Raises:
            ParametersError: there are no test data.
        """
        if not self._can_evaluate:
            raise ParametersError(
                "evaluate_now() needs test data: pass test_data_loader to run(), or validation_data to fit(), and "
                "leave training.skip_evaluation false."
            )
        self._evaluates = True

    def save_now(self) -> None:
        """Starts a checkpoint after the current weight update; `on_checkpoint` gets the report.

        Raises:
            ParametersError: the run has no folder of checkpoints.
        """
        if self.parameters.checkpoint.checkpoints_dir is None:
            raise ParametersError("save_now() needs checkpoint.checkpoints_dir; set it to a folder.")
        self._saves = True

    @property
    def stop_reason(self) -> str | None:
        """Why the run is to stop; None: it is not, or another rank knows."""
        return self._stop_reason

    def begin_batch(self) -> None:
        """Allows `skip_step` until `take_skip`."""
        self._skips = False

    def take_skip(self) -> bool:
        """Whether the batch is to be skipped."""
        skips, self._skips = bool(self._skips), None
        return skips

    def take_numbers(self) -> dict[str, float | None]:
        """What was asked since the last call, as numbers that can travel (see `onward.engine.steering.MESSAGE`)."""
        adjustment, is_adjusted = self._adjustment, self._is_adjusted
        fixed = -1.0 if adjustment.fixed is None else adjustment.fixed
        numbers = {
            "stop": None if self._stop_reason is None else 1.0,
            "evaluate": 1.0 if self._evaluates else None,
            "save": 1.0 if self._saves else None,
            "rate_scale": adjustment.scale if is_adjusted else None,
            "rate_fixed": fixed if is_adjusted else None,
        }
        self._is_adjusted = self._evaluates = self._saves = False
        return numbers


class Callback:
    """Watches a run and steers it: derive from it, override the hooks you need, and pass it as a watcher.

    `self.control` is there from `on_run_start` on. An exception in a hook ends the run, after what was trained is
    saved; with `stop_on_error = False` it is reported once, the callback is closed, and training continues.
    Hooks are called on every rank of a run; the requests of rank 0 are carried out.
    """

    control: Control
    stop_on_error: bool = True

    def on_run_start(self, start: RunStart) -> None:
        """Called when a round begins, or resumes after a checkpoint."""

    def on_batch(self, batch: Batch) -> None:
        """Called before every step with its batch; `self.control.skip_step()` leaves it out."""

    def on_update(self, report: UpdateReport) -> None:
        """Called after every weight update; reading `report.loss` waits for the device."""

    def on_step(self, report: StepReport) -> None:
        """Called for every displayed update: every `training.display_loss_steps`-th, the first and the last."""

    def on_epoch_end(self, report: EpochReport) -> None:
        """Called after the step that finished a pass over the training data."""

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Called after every evaluation."""

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """Called after a checkpoint was started."""

    def on_roll_back(self, report: RollBackReport) -> None:
        """Called after training returned to a checkpoint because of a spike (`on_bad_loss`)."""

    def on_message(self, text: str) -> None:
        """Called with one sentence for the user."""

    def on_end(self, summary: RunSummary) -> None:
        """Called when a round ends, also when a callback stopped it."""

    def on_exception(self, error: BaseException) -> None:
        """Called when an error or an interruption ends the run; the error is raised afterwards."""

    def close(self) -> None:
        """Called once, at the very end."""

    def state_dict(self) -> Mapping[str, Any]:
        """What a checkpoint keeps of this callback, in JSON's types, so that a resumed run steers as before."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave when the checkpoint was saved; called before `on_run_start`."""


_HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))
_NEEDED = ("on_step", "on_evaluation", "on_checkpoint", "on_message", "on_end", "close")


def check_watchers(watchers: Any) -> None:
    """Checks that these are watchers, and that no hook of a callback is misspelt.

    Raises:
        ParametersError: what is none, or a method that is almost a hook.
    """
    if not isinstance(watchers, Sequence):
        kind = type(watchers).__name__
        raise ParametersError(
            f"callbacks is a {kind}; expected a list of onward.Callback objects: callbacks=[{kind}()]."
        )
    for one in watchers:
        kind = one.__name__ if isinstance(one, type) else type(one).__name__
        if isinstance(one, type):
            raise ParametersError(f"callbacks holds the class {kind}; pass an object of it: callbacks=[{kind}()].")
        if not all(callable(getattr(one, name, None)) for name in _NEEDED):
            raise ParametersError(
                f"callbacks holds a {kind}, which is no callback. Derive a class from onward.Callback, override hooks "
                "such as on_evaluation(self, report), and pass an object of it."
            )
        others = [name for name in dir(one) if name.startswith("on_") and name not in _HOOKS]
        for name in others if isinstance(one, Callback) else ():
            if near := difflib.get_close_matches(name, _HOOKS, n=1, cutoff=0.75):
                raise ParametersError(
                    f"{kind}.{name} is never called, since callbacks have no such hook. Did you mean {near[0]}? The "
                    f"hooks are {', '.join(_HOOKS)}."
                )
