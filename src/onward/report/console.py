"""What a person sees while a model trains: on a terminal two live lines and permanent ones above, in a log plain lines.

Every permanent line starts with what it is about (train, eval, saved, note), so that both modes read alike
and a log can be searched.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from onward.engine.reports import CheckpointReport, EvaluationReport, RunSummary, StepReport
from onward.remote.files import url_of
from onward.report.formatting import format_duration
from onward.report.lines import SPARKLINE_SAMPLE, Field, LossHistory, evaluation_fields, step_fields, summary_rows

REFRESHES_PER_SECOND = 2
"""How often the live lines are redrawn; between two reports only the time left changes."""


ONE_ROW_FROM_COLUMNS = 132
"""Width of a terminal from which all numbers of the live lines are in one row."""

_KIND_STYLES = {"train": "bold cyan", "eval": "bold green", "saved": "bold magenta", "note": "bold"}

INDENT = " " * 7
"""What is stored below the first word of a line."""


class ConsoleWatcher:
    """Shows a run on a stream, live where the stream is a terminal.

    Args:
        stream: where to write; `sys.stdout` by default.
        live: True for lines updated in place, False for plain ones; None finds out from the stream.
        clock: a monotonic clock in seconds.
        most_lines: training lines of a round at most, besides its first and last, where they are plain; None: one for
            every displayed update.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
        most_lines: int | None = None,
    ) -> None:
        self.stream = stream if stream is not None else sys.stdout
        self.live = _is_terminal(self.stream) if live is None else live
        self._clock = clock
        self._view: Live | None = None
        self._report: StepReport | None = None
        self._reported_at = 0.0
        self._most_lines, self._lines_due = most_lines, -1
        self._history = LossHistory()
        # A log keeps the width its lines have; rich would wrap them at 80.
        self._console = Console(
            file=self.stream,
            force_terminal=self.live,
            color_system="auto" if self.live else None,
            force_interactive=self.live,
            highlight=False,
            markup=False,
            emoji=False,
            width=None if self.live else 120,
        )

    def on_step(self, report: StepReport) -> None:
        """Moves the live lines on, or writes a line."""
        if self._report is None or report.round != self._report.round:
            self._history, self._lines_due = LossHistory(), -1
        self._report, self._reported_at = report, self._clock()
        self._history.append(report.loss)
        if not self.live:
            if self._is_due(report):
                self._write("train", [_step(report), *step_fields(report, with_time_left=True)])
        elif self._view is None:
            self._view = Live(
                console=self._console,
                get_renderable=self._draw,
                refresh_per_second=REFRESHES_PER_SECOND,
                transient=True,
                redirect_stdout=self.stream in (sys.stdout, sys.stderr),
                redirect_stderr=self.stream in (sys.stdout, sys.stderr),
            )
            self._view.start(refresh=True)

    def _is_due(self, report: StepReport) -> bool:
        """Whether a plain line is written for this update: the lines are spread evenly over the round."""
        if self._most_lines is None:
            return True
        before, self._lines_due = self._lines_due, report.step * self._most_lines // max(1, report.num_train_steps)
        return self._lines_due > before

    def on_evaluation(self, report: EvaluationReport) -> None:
        """One permanent line."""
        seen = Field(label="", value=f"{report.samples:,} samples in {format_duration(report.seconds)}", style="dim")
        self._write("eval", [self._step_of(report.step), *evaluation_fields(report), seen])

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """One permanent line."""
        stalled = Field(label="", value=f"stalled {format_duration(report.stall_seconds)}", style="dim")
        self._write("saved", [self._step_of(report.step), Field(label="", value=_short_path(report.path)), stalled])

    def on_message(self, text: str) -> None:
        """The text as it is; a table keeps its lines."""
        first, *rest = text.splitlines() or [""]
        self._write("note", [Field(label="", value=first)])
        for line in rest:
            self._print(Text(f"{INDENT}{line}"))

    def on_end(self, summary: RunSummary) -> None:
        """Takes the live lines away and writes the summary."""
        self._stop_view()
        self._print(Text(""))
        title = "summary" if summary.round == 0 else f"summary of round {summary.round}"
        rows = summary_rows(summary, arrow="→" if self._encodes("→") else "->", short_path=_short_path)
        if self.live:
            table = Table.grid(padding=(0, 3), pad_edge=False)
            table.add_column(style="dim", no_wrap=True)
            table.add_column(overflow="fold")
            for label, value in rows:
                table.add_row(label, value)
            heading = Text(title, style="bold")
            self._console.print(Panel(table, title=heading, title_align="left", border_style="dim", expand=False))
        else:
            self._print(Text(title))
            width = max(len(label) for label, _ in rows)
            for label, value in rows:
                self._print(Text(f"  {label:<{width}}  {value}"))
        self._print(Text(""))
        self._report = None
        self._history = LossHistory()

    def close(self) -> None:
        """Leaves the terminal as it was; a round that did not end leaves its last line."""
        report = self._report
        if self._stop_view() and report is not None:
            self._write("train", [_step(report), *step_fields(report)])
        self._report = None

    def _stop_view(self) -> bool:
        view, self._view = self._view, None
        if view is None:
            return False
        view.stop()
        return True

    def _step_of(self, step: int) -> Field:
        """As wide as the steps of training lines, so that what follows is in one column."""
        count = self._report.num_train_steps if self._report is not None else 0
        return Field(label="step", value=f"{step:>{len(str(count))}}", width=2 * len(str(count)) + 1)

    def _write(self, kind: str, fields: Iterable[Field]) -> None:
        line = Text().append(kind.ljust(len(INDENT)), style=_KIND_STYLES[kind])
        line.append_text(_join(list(fields)))
        line.rstrip()
        self._print(line)

    def _print(self, line: Text) -> None:
        if self.live:
            head, body = line.divide([len(INDENT)]) if line.cell_len > self._console.width else (line, Text())
            for part in body.wrap(self._console, max(20, self._console.width - len(INDENT))) or [Text()]:
                self._console.print(head.append_text(part), soft_wrap=True)
                head = Text(INDENT)
            return
        text = line.plain
        if not self._encodes(text):
            encoding = self.stream.encoding or "ascii"
            text = text.encode(encoding, "backslashreplace").decode(encoding)
        self.stream.write(f"{text}\n")
        self.stream.flush()

    def _encodes(self, text: str) -> bool:
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        try:
            text.encode(encoding)
        except UnicodeEncodeError:
            return False
        return True

    def _draw(self) -> Group:
        report = self._report
        if report is None:
            return Group()
        width = self._console.width
        left = max(0.0, report.seconds_left - (self._clock() - self._reported_at))
        head = (
            Text().append("train".ljust(len(INDENT)), style=_KIND_STYLES["train"]).append_text(_join([_step(report)]))
        )
        epoch = Field(label="epoch", value=str(report.epoch), importance=1)
        share = report.step / max(report.num_train_steps, 1)
        tail = _fit(
            [Field(label="", value=f"{share:4.0%}", importance=3), epoch, _left(left)], width - head.cell_len - 12
        )
        bar = ProgressBar(
            total=max(report.num_train_steps, 1),
            completed=report.step,
            width=max(4, min(40, width - head.cell_len - tail.cell_len - 2)),
            complete_style="cyan",
            finished_style="green",
        )
        first = Table.grid(padding=(0, 1), pad_edge=False)
        first.add_row(head, bar, tail)
        fields = step_fields(report)
        if self._encodes(SPARKLINE_SAMPLE):
            fields.insert(1, Field(label="", value=self._history.sparkline(16), style="cyan", importance=0))
        # The number of lines follows from the width alone, so that the live area never jumps.
        rows = [fields] if width >= ONE_ROW_FROM_COLUMNS else _numbers_and_rates(fields)
        lines = [Text(INDENT).append_text(_fit(row, width - len(INDENT))) for row in rows if row]
        for line in lines:
            line.no_wrap, line.overflow = True, "crop"
        return Group(first, *lines)


def _step(report: StepReport) -> Field:
    count = str(report.num_train_steps)
    prefix = f"round {report.round}  step" if report.round else "step"
    return Field(label=prefix, value=f"{report.step:>{len(count)}}/{count}", importance=9)


def _left(seconds: float) -> Field:
    return Field(label="", value=f"{format_duration(seconds)} left", importance=4)


def _join(fields: Sequence[Field]) -> Text:
    line = Text()
    for index, field in enumerate(fields):
        line.append("   " if index else "")
        line.append(f"{field.label} " if field.label else "", style="dim")
        line.append(f"{field.value:<{field.width}}", style=field.style)
    return line


def _numbers_and_rates(fields: Sequence[Field]) -> list[list[Field]]:
    """The fields in two rows: what the network does, and how fast."""
    rates = [field for field in fields if field.is_rate]
    return [[field for field in fields if not field.is_rate], rates]


def _fit(fields: Sequence[Field], width: int) -> Text:
    """The fields in one line, the least important left out until it fits."""
    kept = list(fields)
    while len(kept) > 1 and _join(kept).cell_len > width:
        kept.remove(min(kept, key=lambda field: field.importance))
    return _join(kept)


def _is_terminal(stream: TextIO) -> bool:
    """Whether lines can be updated in place. Not asked of rich: `FORCE_COLOR`, set by some CIs, deceives it."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def _short_path(path: str) -> str:
    """Relative to the current directory where it is inside."""
    if url_of(path) is not None:
        return path
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return path
