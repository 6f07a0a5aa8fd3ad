"""What all experiment trackers have in common: events as named values, and the id under which a resumed run continues.

The package of a tracker is imported only where its section of RUN.yaml asks for it, on the rank that reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from onward.engine.callbacks import Callback
from onward.engine.reports import EvaluationReport, RunSummary, StepReport

Plain = int | float | str | bool | None

STEP_FIELDS = (
    "loss",
    "learning_rate",
    "gradient_norm",
    "loss_scale",
    "skipped_updates",
    "samples_per_second",
    "tokens_per_second",
    "data_wait_seconds",
    "mfu",
    "peak_memory_bytes",
    "epoch",
)
"""Fields of a `StepReport` that are reported as `train/<field>`."""


class TrackerRun(Protocol):
    """One run in a tracker: what a tracker's package must be able to do."""

    @property
    def id(self) -> str:
        """By which the tracker knows the run."""

    def log(self, values: Mapping[str, float], update: int) -> None:
        """Adds a point to the curve of each name."""

    def describe(self, values: Mapping[str, Plain]) -> None:
        """Sets results of the entire run, by name."""

    def write_text(self, name: str, text: str) -> None:
        """Keeps a text as a file of the run."""

    def refer_to_model(self, path: str) -> None:
        """Notes where the trained model is; it is not uploaded."""

    def finish(self, status: str) -> None:
        """The run is over: `done`, `interrupted` or `failed`."""


class Tracker(Callback):
    """Reports to one run of a tracker. Its failure is reported once and does not end training.

    Args:
        run: in the tracker, open.
        messages: what was reported before it was opened.
    """

    stop_on_error = False

    def __init__(self, run: TrackerRun, messages: tuple[str, ...] = ()) -> None:
        self.run = run
        self._messages = list(messages)
        self._status: str | None = None
        self._is_closed = False

    def on_step(self, report: StepReport) -> None:
        """Adds `train/<field>`."""
        found = {f"train/{name}": getattr(report, name) for name in STEP_FIELDS}
        self.run.log({name: float(value) for name, value in found.items() if value is not None}, report.update)

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Adds `test/<metric>`."""
        self.run.log({f"test/{name}": float(value) for name, value in report.metrics.items()}, report.update)

    def on_message(self, text: str) -> None:
        """Kept for `messages.txt`, which is written when a round ends and when the run is over."""
        self._messages.append(text)

    def on_end(self, summary: RunSummary) -> None:
        """Sets the results of the round."""
        fields = ("steps", "updates", "samples", "first_loss", "last_loss", "seconds", "stable_samples_per_second")
        before = ("steps_before", "updates_before", "samples_before", "first_loss_of_round")
        names = (*fields, *before) if summary.steps_before else fields
        found: dict[str, Plain] = {f"summary/{name}": getattr(summary, name) for name in names}
        found |= {"summary/checkpoint": summary.checkpoint, "summary/stopped": summary.stopped}
        found |= {f"summary/test/{name}": value for name, value in summary.metrics.items()}
        self.run.describe({name: value for name, value in found.items() if value is not None})

    def on_trained_model(self, path: str) -> None:
        """Notes where the trained model is."""
        self.run.refer_to_model(path)

    def state_dict(self) -> Mapping[str, Any]:
        """The id of the run, which a resumed run continues; it is read before the tracker is opened."""
        return {"id": self.run.id}

    def finish(self, status: str) -> None:
        """How the run ended; what was set first counts."""
        self._status = self._status or status

    def close(self) -> None:
        """Ends the run in the tracker; one that is closed without having finished has failed."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.run.write_text("messages.txt", "".join(f"{text}\n" for text in self._messages))
        finally:
            self.run.finish(self._status or "failed")


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Plain]:
    """Nested mappings as one, with `section.field` as names; lists as text."""
    found: dict[str, Plain] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value if isinstance(value, int | float | str | None) else str(value)
    return found
