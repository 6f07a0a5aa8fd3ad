"""What a notebook shows while a model trains: one display that is updated in place, evaluations and messages above."""

from __future__ import annotations

import html
import importlib
import time
from collections.abc import Callable, Iterable
from typing import Any

from onward.engine.reports import CheckpointReport, EvaluationReport, RunSummary, StepReport
from onward.report.formatting import format_duration
from onward.report.lines import Field, LossHistory, evaluation_fields, step_fields, summary_rows

REFRESH_SECONDS = 0.25
"""Between two updates of the display at least; a notebook keeps every message that a browser has to draw."""

_LINES = "margin: 0; font-family: monospace; white-space: pre-wrap; overflow-wrap: anywhere"

KEPT_LINES = 30
"""Permanent lines that stay visible above the progress."""


class NotebookWatcher:
    """Shows a run below the cell that runs it.

    Args:
        show: (plain text, HTML, handle of the display or None) -> handle; None: IPython's display.
        clock: a monotonic clock in seconds.
    """

    def __init__(
        self, show: Callable[[str, str, Any], Any] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._show = _display if show is None else show
        self._clock = clock
        self._handle: Any = None
        self._lines: list[str] = []
        self._left_out = 0
        self._report: StepReport | None = None
        self._history = LossHistory()
        self._drawn_at = float("-inf")

    def on_step(self, report: StepReport) -> None:
        """Updates the progress."""
        self._report = report
        self._history.append(report.loss)
        self._draw(is_forced=report.step == report.num_train_steps)

    def on_evaluation(self, report: EvaluationReport) -> None:
        """One permanent line."""
        seen = Field(label="", value=f"{report.samples:,} samples in {format_duration(report.seconds)}")
        self._write("eval", [Field(label="step", value=str(report.step)), *evaluation_fields(report), seen])

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """One permanent line."""
        self._write("saved", [Field(label="step", value=str(report.step)), Field(label="", value=report.path)])

    def on_message(self, text: str) -> None:
        """The text as it is."""
        first, *rest = text.splitlines() or [""]
        self._lines += [f"note   {first}", *(f"       {line}" for line in rest)]
        self._draw(is_forced=True)

    def on_end(self, summary: RunSummary) -> None:
        """The summary below the last state of the progress; the next round has its own display."""
        rows = summary_rows(summary, arrow="→", short_path=str)
        width = max(len(label) for label, _ in rows)
        self._draw(is_forced=True, below=[f"{label:<{width}}  {value}" for label, value in rows])
        self._restart_display()

    def close(self) -> None:
        """Leaves what is shown."""
        if self._report is not None:
            self._draw(is_forced=True)
        self._restart_display()

    def _restart_display(self) -> None:
        self._handle, self._report = None, None
        self._lines, self._left_out, self._history = [], 0, LossHistory()

    def _write(self, kind: str, fields: Iterable[Field]) -> None:
        self._lines.append(f"{kind:<7}{_join(fields)}")
        self._draw(is_forced=True)

    def _draw(self, is_forced: bool, below: Iterable[str] = ()) -> None:
        now = self._clock()
        if not is_forced and now - self._drawn_at < REFRESH_SECONDS:
            return
        self._drawn_at = now
        if len(self._lines) > KEPT_LINES:
            self._left_out += len(self._lines) - KEPT_LINES
            del self._lines[: len(self._lines) - KEPT_LINES]
        above = [f"({self._left_out} earlier lines)"] if self._left_out else []
        above += self._lines
        report = self._report
        live = [] if report is None else [_progress(report), f"       {_join(self._numbers(report))}"]
        plain = "\n".join([*above, *live, *below])
        self._handle = self._show(plain, _page(above, report, live, list(below)), self._handle)

    def _numbers(self, report: StepReport) -> list[Field]:
        fields = step_fields(report)
        fields.insert(1, Field(label="", value=self._history.sparkline(16)))
        return fields


def _progress(report: StepReport) -> str:
    share = report.step / max(report.num_train_steps, 1)
    name = f"round {report.round}  step" if report.round else "step"
    left = f"{format_duration(report.seconds_left)} left"
    return f"train  {name} {report.step}/{report.num_train_steps}   {share:4.0%}   epoch {report.epoch}   {left}"


def _join(fields: Iterable[Field]) -> str:
    return "   ".join(f"{field.label} {field.value}".strip() for field in fields)


def _page(above: list[str], report: StepReport | None, live: list[str], below: list[str]) -> str:
    """The same lines as HTML, with a bar."""
    bar = ""
    if report is not None:
        shares = f'value="{report.step}" max="{max(report.num_train_steps, 1)}"'
        bar = f'<progress {shares} style="width: 40em; max-width: 100%"></progress>'
    parts = [_lines(above), bar, _lines(live), _lines(below)]
    return "".join(part for part in parts if part)


def _lines(lines: list[str]) -> str:
    return f'<pre style="{_LINES}">{html.escape(chr(10).join(lines))}</pre>' if lines else ""


def _display(plain: str, page: str, handle: Any) -> Any:
    display = importlib.import_module("IPython.display").display
    bundle = {"text/plain": plain, "text/html": page}
    if handle is None:
        return display(bundle, raw=True, display_id=True)
    handle.update(bundle, raw=True)
    return handle
