"""The history of a run as columns: what its updates and evaluations reported."""

from __future__ import annotations

from onward.engine.reports import CheckpointReport, EvaluationReport, RunSummary, StepReport
from onward.tables import html_curve, html_table

_STEP_COLUMNS = ("step", "update", "epoch", "loss", "learning_rate", "gradient_norm", "samples_per_second")


class History:
    """A watcher that records what a run reports.

    Attributes:
        steps: column -> values, one for each displayed update: step, update, epoch, loss, learning_rate,
            gradient_norm, samples_per_second. `pandas.DataFrame(history.steps)` is a table of them.
        evaluations: column -> values, one for each evaluation: step, update, and every metric by its name.
        messages: the notes of the run.
        summaries: one per round.
    """

    def __init__(self) -> None:
        self.steps: dict[str, list[float]] = {name: [] for name in _STEP_COLUMNS}
        self.evaluations: dict[str, list[float]] = {"step": [], "update": []}
        self.messages: list[str] = []
        self.summaries: list[RunSummary] = []

    @property
    def loss(self) -> list[float]:
        """The training losses, in order."""
        return self.steps["loss"]

    def on_step(self, report: StepReport) -> None:
        """One row."""
        for name, column in self.steps.items():
            column.append(getattr(report, name))

    def on_evaluation(self, report: EvaluationReport) -> None:
        """One row; a metric that is new has no value before."""
        row = {"step": report.step, "update": report.update, **report.metrics}
        rows = len(self.evaluations["step"])
        for name in row:
            self.evaluations.setdefault(name, [float("nan")] * rows)
        for name, column in self.evaluations.items():
            column.append(row.get(name, float("nan")))

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """Nothing to remember."""

    def on_message(self, text: str) -> None:
        """Records it."""
        self.messages.append(text)

    def on_end(self, summary: RunSummary) -> None:
        """Records it."""
        self.summaries.append(summary)

    def close(self) -> None:
        """Keeps what it has."""

    def __repr__(self) -> str:
        losses = f", loss {self.loss[0]:.4g} to {self.loss[-1]:.4g}" if self.loss else ""
        return f"History({len(self.loss)} displayed updates{losses}, {len(self.evaluations['step'])} evaluations)"

    def _repr_html_(self) -> str:
        """The curve of the training loss, and the evaluations as a table."""
        names = list(self.evaluations)
        rows = [[f"{value:.6g}" for value in row] for row in zip(*self.evaluations.values(), strict=True)]
        table = html_table([names, *rows[-20:]], right=range(len(names))) if rows else ""
        return html_curve(f"training loss, {len(self.loss)} displayed updates", self.loss) + table
