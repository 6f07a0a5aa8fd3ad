"""What each line of the console says: reports turned into labelled fields, with no notion of a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from onward.engine.reports import EvaluationReport, RunSummary, StepReport
from onward.report.formatting import (
    format_bytes,
    format_duration,
    format_learning_rate,
    format_loss_scale,
    format_metric,
    format_rate,
    format_value,
)

DATA_WAIT_SHOWN_FROM = 0.03
"""Share of the time spent waiting for data from which the console mentions it."""

MFU_SHOWN_FROM = 0.005
"""Below it the model FLOPs utilization, which would be shown as 0%, is left out: the model is tiny."""

STABLE_STEPS = 128
"""Steps that the stable throughput of a `RunSummary` covers at most."""

SPARKLINE_SAMPLE = "▁▂▃▄▅▆▇█"
"""The characters a sparkline is made of, lowest first."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """One labelled value of a line.

    Attributes:
        label, value: what is written.
        width: characters the value takes at least, so that columns stand still.
        style: how rich shows the value.
        importance: fields of the lowest importance leave first where a terminal is narrow.
        is_rate: whether it says how fast the run goes, not what the network does.
    """

    label: str
    value: str
    width: int = 0
    style: str = ""
    importance: int = 5
    is_rate: bool = False


def step_fields(report: StepReport, with_time_left: bool = False) -> list[Field]:
    """Everything a training line says in addition to the step; what is not always there comes last.

    Args:
        report: what to say.
        with_time_left: whether to say how long the round still takes.
    """
    finite = math.isfinite(report.loss)
    norm_style = "" if math.isfinite(report.gradient_norm) else "yellow"
    fields = [
        Field(
            label="loss", value=format_value(report.loss), width=7, style="bold" if finite else "bold red", importance=9
        ),
        Field(label="lr", value=format_learning_rate(report.learning_rate), width=7, importance=6),
        Field(label="grad", value=format_value(report.gradient_norm), width=7, style=norm_style, importance=5),
        Field(label="", value=format_rate(report.samples_per_second, "samples"), width=15, importance=8, is_rate=True),
    ]
    if report.tokens_per_second is not None:
        fields.append(
            Field(label="", value=format_rate(report.tokens_per_second, "tokens"), width=14, importance=4, is_rate=True)
        )
    if with_time_left:
        fields.append(Field(label="", value=f"{format_duration(report.seconds_left)} left", width=12, importance=4))
    if report.loss_scale is not None:
        fields.append(Field(label="scale", value=format_loss_scale(report.loss_scale), width=4, importance=3))
    if report.skipped_updates:
        fields.append(Field(label="skipped", value=str(report.skipped_updates), style="yellow", importance=7))
    if report.mfu is not None and report.mfu >= MFU_SHOWN_FROM:
        fields.append(Field(label="MFU", value=f"{report.mfu:.0%}", width=4, importance=3, is_rate=True))
    if report.peak_memory_bytes is not None:
        fields.append(Field(label="memory", value=format_bytes(report.peak_memory_bytes), importance=2, is_rate=True))
    wait = report.data_wait_seconds / report.seconds if report.seconds > 0 else 0.0
    if wait >= DATA_WAIT_SHOWN_FROM:
        fields.append(Field(label="data wait", value=f"{wait:.0%}", style="yellow", importance=7, is_rate=True))
    return fields


def evaluation_fields(report: EvaluationReport) -> list[Field]:
    """The metrics, the loss first."""
    names = sorted(report.metrics, key=lambda name: (name != "loss", name != "accuracy", name))
    return [Field(label=name, value=format_metric(name, report.metrics[name]), width=7, style="bold") for name in names]


def summary_rows(summary: RunSummary, arrow: str, short_path: Callable[[str], str]) -> list[tuple[str, str]]:
    """Label and value of every row of the final table."""
    skipped = f", {summary.skipped_updates:,} of them skipped" if summary.skipped_updates else ""
    if 2 * summary.skipped_updates > summary.updates:
        skipped += " (most): gradients were not finite, and little was trained"
    accumulation = summary.gradient_accumulation_steps
    batches = f"batches of {summary.batch_size}"
    if accumulation > 1:
        batches += f", {accumulation} accumulated per update"
    rows = [
        ("steps", _with_total(summary.steps, summary.steps_before, summary)),
        ("updates", _with_total(summary.updates, summary.updates_before, summary) + skipped),
        ("samples", f"{_with_total(summary.samples, summary.samples_before, summary)} in {batches}"),
    ]
    if summary.stopped is not None:
        rows.append(("stopped", summary.stopped))
    if summary.first_loss is not None and summary.last_loss is not None:
        losses = f"{format_value(summary.first_loss)} {arrow} {format_value(summary.last_loss)}{_since(summary)}"
        if summary.steps_before and summary.first_loss_of_round is not None:
            losses += f", {format_value(summary.first_loss_of_round)} at the start of the round"
        rows.append(("loss", losses))
    for name in sorted(summary.metrics, key=lambda name: (name != "loss", name != "accuracy", name)):
        rows.append((f"evaluation {name}", format_metric(name, summary.metrics[name])))
    stable = min(STABLE_STEPS, max(1, summary.steps - 1))
    rows += [
        ("throughput", format_rate(summary.samples_per_second, "samples")),
        (
            "stable throughput",
            f"{format_rate(summary.stable_samples_per_second, 'samples')} over the last "
            f"{'step' if stable == 1 else f'{stable} steps'}",
        ),
        (
            "time",
            f"{format_duration(summary.seconds)}, {format_duration(summary.train_seconds)} of it training"
            + _since(summary),
        ),
        *(
            []
            if summary.mfu is None or summary.mfu < MFU_SHOWN_FROM
            else [("MFU", f"{summary.mfu:.1%} at the stable throughput")]
        ),
        *_memory_rows(summary),
        ("checkpoint", "none" if summary.checkpoint is None else short_path(summary.checkpoint)),
    ]
    return rows


def _since(summary: RunSummary) -> str:
    return f" since step {summary.steps_before:,}" if summary.steps_before else ""


def _with_total(count: int, before: int, summary: RunSummary) -> str:
    """What was counted; of a run that was resumed, also what the entire round amounts to."""
    return f"{count:,}" if not summary.steps_before else f"{count:,}{_since(summary)}, {before + count:,} in total"


def _memory_rows(summary: RunSummary) -> list[tuple[str, str]]:
    peak = summary.peak_memory_bytes
    return [] if peak is None else [("peak process memory", format_bytes(peak))]


class LossHistory:
    """The losses of a round, drawn as one row of bars."""

    _KEPT = 512

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._merged = 1
        self._pending: list[float] = []

    def append(self, loss: float) -> None:
        """Adds a loss; one that is not finite has no height and is left out."""
        if not math.isfinite(loss):
            return
        self._pending.append(loss)
        if len(self._pending) < self._merged:
            return
        self._losses.append(sum(self._pending) / len(self._pending))
        self._pending.clear()
        if len(self._losses) == self._KEPT:
            pairs = zip(self._losses[::2], self._losses[1::2], strict=True)
            self._losses = [(first + second) / 2 for first, second in pairs]
            self._merged *= 2

    def sparkline(self, width: int) -> str:
        """At most `width` bars over the entire round, lowest loss to highest."""
        count = len(self._losses)
        if count < 2:
            return " " * width
        cells = min(width, count)
        edges = [cell * count // cells for cell in range(cells + 1)]
        means = [sum(self._losses[a:b]) / (b - a) for a, b in pairwise(edges)]
        low, high = min(means), max(means)
        if high == low:
            return (SPARKLINE_SAMPLE[0] * cells).ljust(width)
        top = len(SPARKLINE_SAMPLE) - 1
        return "".join(SPARKLINE_SAMPLE[round((mean - low) / (high - low) * top)] for mean in means).ljust(width)
