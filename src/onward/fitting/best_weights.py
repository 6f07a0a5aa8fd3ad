"""The weights of the best evaluation, held in memory while a fit continues, and put into its network at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from onward.artifacts.trained_model import LAST_WEIGHTS, last_of_best
from onward.checkpoint.reading import checkpoint_name, exported_kinds, read_record, read_sharded_tensors
from onward.engine.callbacks import Callback
from onward.engine.evaluating.early_stopping import BestEvaluation
from onward.engine.reports import EvaluationReport
from onward.engine.state import TrainState
from onward.parallel.agreement import gather_numbers
from onward.parallel.sharded_tensors import ShardedTensor
from onward.parameters import Checkpoint

_KINDS = ("weights/", "states/")


@dataclass(frozen=True, kw_only=True)
class HeldWeights:
    """Which weights the network of a fit holds at its end.

    Attributes:
        update: after which they are; None: nothing was evaluated.
        words: for the record of the run; they continue "trained model".
        note: what to report.
    """

    update: int | None = None
    words: str | None = None
    note: str | None = None


class BestWeights(Callback):
    """Copies weights and running statistics at each evaluation that is the best so far.

    Args:
        best: what compares evaluations; it must be notified of them before this.
        state: of the run.
        settings: of its checkpoints, where a run that resumed finds a best evaluation from before.
    """

    def __init__(self, best: BestEvaluation, state: TrainState, settings: Checkpoint) -> None:
        self._best, self._state, self._settings = best, state, settings
        self._kept: dict[str, torch.Tensor] = {}
        self._kept_update = self._evaluated_update = -1

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Copies, to main memory."""
        self._evaluated_update = report.update
        if self._best.best.value is not None and self._best.best.update == report.update:
            with self._state.averaged(self._state.exports_average):
                tensors = self._sharded_tensors()
                self._kept = {name: one.tensor.detach().to("cpu", copy=True) for name, one in tensors.items()}
            self._kept_update = report.update

    def settle(self, evaluate: Callable[[], EvaluationReport] | None) -> HeldWeights:
        """Puts the best weights into the network; all ranks call this together.

        Args:
            evaluate: evaluates the last weights; None: they are not evaluated any more.
        """
        best, last = self._best.best, self._state.counters.update
        is_last, later = best.update == last, None
        if evaluate is not None and self._evaluated_update != last:
            later = evaluate()
            is_last = self._best.beats(later)
        if best.value is None:
            return HeldWeights()
        # Ranks that compute slightly different numbers must not go different ways.
        if gather_numbers(self._state.mesh, float(is_last))[0]:
            return HeldWeights(update=last, words=last_of_best(self._best, later))
        reached = self._best.reached()
        if not self._restore(best.update):
            note = (
                f"the best evaluation ({reached}) was before this call resumed, and its weights were not kept: the "
                "result holds the last weights. Set checkpoint.keep_best to keep them."
            )
            return HeldWeights(update=last, words=LAST_WEIGHTS, note=note)
        note = f"the result holds the weights of the best evaluation ({reached}), not the last ones."
        return HeldWeights(update=best.update, words=f"of the best evaluation ({reached})", note=note)

    def _restore(self, update: int) -> bool:
        tensors, folder = self._sharded_tensors(), self._settings.checkpoints_dir
        if self._kept_update == update:
            with torch.no_grad():
                for name, tensor in self._kept.items():
                    tensors[name].tensor.copy_(tensor)
        elif folder is not None and self._settings.keep_best:
            path = folder / checkpoint_name(update)
            for kind in exported_kinds(read_record(path)):
                own = tensors if kind in _KINDS else self._average_into(tensors)
                mine = {name: sharded for name, sharded in own.items() if name.startswith(kind)}
                read_sharded_tensors(path, mine, kind, group=self._state.mesh.control)
        else:
            return False
        self._state.average = None  # it replaces the weights, where it was what evaluations compared
        for weight in self._state.weights.values():
            weight.update_followers()
        return True

    def _average_into(self, tensors: Mapping[str, ShardedTensor]) -> dict[str, ShardedTensor]:
        """The names of averages -> the weights and statistics that take their values."""
        averages = {} if self._state.average is None else self._state.average.tensors
        by_name = {name.partition("/")[2]: sharded for name, sharded in tensors.items()}
        return {f"average/{name}": by_name[name] for name in averages}

    def _sharded_tensors(self) -> dict[str, ShardedTensor]:
        return {name: sharded for name, sharded in self._state.sharded_tensors().items() if name.startswith(_KINDS)}
