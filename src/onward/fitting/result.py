"""`FitResult`: the trained network, how it got there, and what can be done with it."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from onward.artifacts.trained_model import export_state
from onward.data.sources.temporary import TemporaryFolder
from onward.engine.reports import RunSummary
from onward.engine.steering import INTERRUPTED
from onward.fitting.history import History
from onward.lowering.conversion import to_torch
from onward.lowering.module import OnnxModule
from onward.parameters import Parameters
from onward.report.lines import summary_rows
from onward.runner import TrainingRunner
from onward.tables import html_fields


def was_interrupted(summary: RunSummary) -> bool:
    """Whether Ctrl-C ended a run."""
    return summary.stopped is not None and summary.stopped.startswith(INTERRUPTED)


class FitResult:
    """What `onward.fit` returns.

    Attributes:
        runner: the `TrainingRunner`; its `state` holds weights and moments.
        history: losses and metrics as columns.
        summary: of the run.
        held_update: weight updates that the weights of this result have been through: fewer than all, where they are
            those of the best evaluation.
        parameters: with which it was trained, as a RUN.yaml would say it.
    """

    def __init__(
        self,
        runner: TrainingRunner,
        history: History,
        summary: RunSummary,
        folder: TemporaryFolder | None,
        held_update: int,
    ) -> None:
        self.runner = runner
        self.history = history
        self.summary = summary
        self.held_update = held_update
        self._folder = folder  # holds a model that was not given as a file, as long as this result lives

    @property
    def parameters(self) -> Parameters:
        """The parameters of the run, defaults included."""
        return self.runner.parameters

    @property
    def metrics(self) -> dict[str, float]:
        """Of the evaluation of the weights that the result holds, else of the last one; empty where none was made."""
        columns = self.history.evaluations
        rows = [row for row, update in enumerate(columns["update"]) if update == self.held_update]
        row = rows[-1] if rows else len(columns["update"]) - 1
        return {name: column[row] for name, column in columns.items() if column and name not in ("step", "update")}

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C ended the training before all its steps."""
        return was_interrupted(self.summary)

    @property
    def resumed_update(self) -> int | None:
        """The update of the checkpoint that the training resumed from; None: it began with the model's weights."""
        return self.runner.resumed_update

    @cached_property
    def net(self) -> OnnxModule:
        """The trained model as a torch module, in evaluation mode: `net(*inputs)` gives the model's own outputs.

        Its weights are copies: training it further does not change this result. It takes batches of any size where
        the training did, also where the export fixed one.
        """
        training = self.parameters.training
        net = to_torch(
            self.runner.graph.source,  # with a new head, and the nodes of quantization, where they were asked for
            weights_to_train=training.weights_to_train,
            weights_not_to_train=training.weights_not_to_train,
            tied_weights=training.tied_weights,
            any_batch_size=self.runner.graph.rebatching is not None and not self.parameters.data.fixed_inputs,
            untied_weights=training.untied_weights,
            adapter=self.parameters.adapter,
            seed=training.seed,
            limits=self.parameters.limits,
        )
        trained, own = self.runner.net.tensors_by_name(), net.tensors_by_name()
        changed = (*net.graph.weights, *net.graph.states)
        state = self.runner.state
        with torch.no_grad(), state.averaged(state.exports_average):
            for name in changed:
                own[name].copy_(trained[name])
        return net

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Writes the model with its trained weights, the file's own graph otherwise untouched; returns the path.

        Raises:
            StorageError: it cannot be written.
        """
        export_state(self.runner.state, self.runner.graph, Path(path))
        return Path(path)

    def evaluate(self, data: Any) -> dict[str, float]:
        """The loss and the metrics over data of any kind that `fit` takes.

        Raises:
            DataError: the data do not fit the model.
        """
        return dict(self.runner.evaluate(data).metrics)

    def __repr__(self) -> str:
        summary = self.summary
        said = "" if self.resumed_update is None else f", resumed after {self.resumed_update}"
        if summary.first_loss is not None and summary.last_loss is not None:
            said += f", loss {summary.first_loss:.4g} to {summary.last_loss:.4g}"
        metrics = "".join(f", {name} {value:.4g}" for name, value in self.metrics.items())
        if summary.skipped_updates:
            said += f", {summary.skipped_updates} updates skipped (gradients not finite)"
        stopped = "" if summary.stopped is None else f", stopped: {summary.stopped}"
        validation = f"; validation{metrics[1:]}" if metrics else ""
        return f"FitResult({summary.updates} updates{said}{stopped}{validation})"

    def _repr_html_(self) -> str:
        """What was trained, how it went, and the history."""
        rows = summary_rows(self.summary, arrow="→", short_path=str)
        return html_fields("onward.fit", rows) + self.history._repr_html_()
