"""A watcher that remembers every event, for tests of what a run reports."""

from __future__ import annotations

from dataclasses import dataclass, field

from onward.engine.reports import CheckpointReport, EvaluationReport, RunSummary, StepReport


@dataclass
class Recorder:
    steps: list[StepReport] = field(default_factory=list)
    evaluations: list[EvaluationReport] = field(default_factory=list)
    checkpoints: list[CheckpointReport] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    summaries: list[RunSummary] = field(default_factory=list)
    closed: int = 0

    def on_step(self, report: StepReport) -> None:
        self.steps.append(report)

    def on_evaluation(self, report: EvaluationReport) -> None:
        self.evaluations.append(report)

    def on_checkpoint(self, report: CheckpointReport) -> None:
        self.checkpoints.append(report)

    def on_message(self, text: str) -> None:
        if not text.startswith("speed.compile: off, since on a CPU"):  # which every run says here
            self.messages.append(text)

    def on_end(self, summary: RunSummary) -> None:
        self.summaries.append(summary)

    def close(self) -> None:
        self.closed += 1

    @property
    def losses(self) -> list[float]:
        return [report.loss for report in self.steps]
