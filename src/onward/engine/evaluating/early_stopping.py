"""Which evaluation of a round is the best, and when a round ends because evaluations no longer improve.

What is remembered belongs to checkpoints, so that a resumed run stops after the same update as one never interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from onward.engine.callbacks import Callback
from onward.engine.evaluating.evaluation import Evaluator
from onward.engine.reports import EvaluationReport, RunStart, RunSummary
from onward.errors import ParametersError
from onward.parameters import Parameters
from onward.parameters.evaluation import EarlyStopping

NOTHING_TO_COMPARE = (
    "early_stopping.patience and checkpoint.keep_best compare evaluations, but there are no test data. Set "
    "paths.test_data_dir, or pass test_data_loader to run()."
)


@dataclass(kw_only=True)
class BestSoFar:
    """What the evaluations of a round amount to.

    Attributes:
        round: which.
        value, update, step: of the best evaluation, with the updates done by then; no value: there was none yet.
        reference: the value that an evaluation has to improve upon by `min_delta`.
        without_improvement: evaluations since then.
        weights_update: of which the weights were that were evaluated last; None: none were yet.
    """

    round: int = 0
    value: float | None = None
    update: int = 0
    step: int = 0
    reference: float | None = None
    without_improvement: int = 0
    weights_update: int | None = None


class BestEvaluation(Callback):
    """Compares evaluations, stops a round after `patience` of them without improvement, and keeps the best checkpoint.

    Args:
        settings: section `early_stopping`.
        is_larger_better: how evaluations compare.
        saves: whether the state of the best one is saved.
    """

    def __init__(self, settings: EarlyStopping, is_larger_better: bool, saves: bool) -> None:
        self.settings = settings
        self.saves = saves
        self.best = BestSoFar()
        self._sign = -1.0 if is_larger_better else 1.0
        self._is_running = False

    def on_run_start(self, start: RunStart) -> None:
        """Every round compares its own evaluations; a resumed round continues with the earlier ones."""
        if start.step == 0 or start.round != self.best.round:
            self.best = BestSoFar(round=start.round)
        self._is_running = True

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Compares, and asks to save or to stop."""
        if not self._is_running:
            return
        value, best = self._value(report), self.best
        if report.stale_updates and report.weights_update == best.weights_update:
            return  # workers of local SGD have not synchronized since: the same weights are no lack of improvement
        best.weights_update = report.weights_update
        # Workers that synchronize at the end of a round are evaluated again, and the checkpoint of that update is of
        # the later weights.
        is_again = best.value is not None and best.update == report.update
        if is_again or self.improves(value, best.value):
            best.value, best.update, best.step = value, report.update, report.step
            if self.saves:
                self.control.save_now()
        if self.improves(value, best.reference, self.settings.min_delta):
            best.reference, best.without_improvement = value, 0
            return
        best.without_improvement += 1
        patience = self.settings.patience
        if patience is not None and best.without_improvement >= patience:
            self.control.stop(self._reason(patience))

    @property
    def kept_update(self) -> int | None:
        """Updates done by the best evaluation, whose checkpoint is kept; None: there is none."""
        return self.best.update if self.saves and self.best.value is not None else None

    def on_end(self, summary: RunSummary) -> None:
        """Evaluations after the round compare nothing."""
        self._is_running = False

    def improves(self, value: float, on: float | None, min_delta: float = 0.0) -> bool:
        """Whether a value is better than another, by more than `min_delta`; NaN never is, and anything is than None."""
        if math.isnan(value):
            return False
        return on is None or self._sign * (on - value) > min_delta

    def beats(self, report: EvaluationReport) -> bool:
        """Whether a later evaluation is better than the best of the round."""
        return self.improves(self._value(report), self.best.value)

    def reached(self, later: EvaluationReport | None = None) -> str:
        """The best evaluation in words, "loss 0.5 at step 30": of the round, or a later one that is better."""
        value, step = self.best.value, self.best.step
        if later is not None and self.beats(later):
            value, step = self._value(later), later.step
        return f"{self.settings.metric} {math.nan if value is None else value:.4g} at step {step:,}"

    def state_dict(self) -> Mapping[str, Any]:
        """The best so far, and how many evaluations did not improve."""
        state = asdict(self.best) | {"compared": self._compared}
        return {name: str(value) if value in (math.inf, -math.inf) else value for name, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what a checkpoint holds, unless values of another metric were compared."""
        state = dict(state)
        if state.pop("compared", self._compared) != self._compared:
            return
        numbers = {name: float(state[name]) for name in ("value", "reference") if state[name] is not None}
        self.best = BestSoFar(**{**state, **numbers})

    @property
    def _compared(self) -> str:
        return f"{'largest' if self._sign < 0 else 'smallest'} {self.settings.metric}"

    def _value(self, report: EvaluationReport) -> float:
        name = self.settings.metric
        if name not in report.metrics:
            raise ParametersError(_unknown(name, report.metrics))
        return float(report.metrics[name])

    def _reason(self, patience: int) -> str:
        best = self.best
        times = "the last evaluation" if patience == 1 else f"the last {patience} evaluations"
        reached = "every value was NaN" if best.value is None else f"best {best.value:.4g} at step {best.step:,}"
        return f"early stopping: {self.settings.metric} did not improve in {times}; {reached}"


def best_evaluation(parameters: Parameters, evaluator: Evaluator) -> BestEvaluation | None:
    """What compares evaluations as parameters ask; None: they do not.

    Raises:
        ParametersError: evaluations have no such metric, or it is not known whether larger is better.
    """
    settings, checkpoint = parameters.early_stopping, parameters.checkpoint
    if settings.patience is None and not checkpoint.keep_best:
        return None
    directions = evaluator.directions
    known = directions.get(settings.metric, directions.get(settings.metric.partition("/")[0]))
    if settings.metric not in directions and settings.metric.partition("/")[0] not in directions:
        raise ParametersError(_unknown(settings.metric, directions))
    if settings.mode == "auto" and known is None:
        raise ParametersError(
            f"early_stopping.mode is auto, but it is unknown whether a larger {settings.metric} is better. Set it to "
            "min or max."
        )
    is_larger_better = bool(known) if settings.mode == "auto" else settings.mode == "max"
    return BestEvaluation(settings, is_larger_better, checkpoint.keep_best)


def _unknown(name: str, known: Mapping[str, Any]) -> str:
    return (
        f"early_stopping.metric is {name!r}, which evaluations do not compute; expected one of {', '.join(known)}. "
        "Set one of these, or add it to training.metrics."
    )
