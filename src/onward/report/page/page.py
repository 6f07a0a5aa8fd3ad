"""The report as HTML: what came out, curves, the plan, the slowest nodes, settings and environment, notes."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from onward.report.formatting import format_bytes, format_duration, format_metric
from onward.report.page.charts import COLORS, Series, line_chart
from onward.report.page.run_record import RecordedRun, flatten
from onward.report.page.units import in_units

MOST_NODES = 20
FIRST_CURVES = ("loss", "gradient_norm", "learning_rate", "samples_per_second", "tokens_per_second")
"""In this order; every other number that a step reports comes after them."""
_LESS_IS_BETTER = ("loss", "seconds", "error", "perplexity")


@dataclass(frozen=True)
class PlanPicture:
    """The plan of a run: its text and its picture as SVG, or why there is none."""

    text: str = ""
    svg: str = ""
    missing: str = ""


def render_page(runs: Sequence[RecordedRun], plans: Mapping[str, PlanPicture]) -> str:
    """One page for one run or several.

    Args:
        runs: with names that differ.
        plans: by the name of a run.
    """
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    sections = {
        "Results": _results(runs),
        "Curves": _curves(runs),
        "Roll-backs": "".join(_rollbacks(run, len(runs)) for run in runs),
        "Plan and memory": "".join(_plan(run, plans.get(run.name, PlanPicture()), len(runs)) for run in runs),
        "Slowest nodes": "".join(_nodes(run, len(runs)) for run in runs),
        "Settings": _settings(runs),
        "Environment": _environment(runs),
        "Notes": "".join(_notes(run, len(runs)) for run in runs),
    }
    links = "".join(f'<a href="#{_anchor(name)}">{name}</a>' for name, body in sections.items() if body)
    body = "".join(f'<h2 id="{_anchor(name)}">{name}</h2>{text}' for name, text in sections.items() if text)
    style, script = _resource("page.css"), _resource("page.js")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_text(title)} - onward</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head><body>'
        f'<h1>{_text(title)}</h1><p class="about">{_about(runs)}</p><nav>{links}</nav>{body}'
        f"<script>{script}</script></body></html>\n"
    )


def _resource(name: str) -> str:
    return resources.files("onward.report.page").joinpath(name).read_text(encoding="utf-8")


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _text(value: Any) -> str:
    return html.escape(str(value))


def _about(runs: Sequence[RecordedRun]) -> str:
    parts = [f"{_text(run.folder)}: {_state(run)}" for run in runs]
    return "<br>".join(parts)


def _state(run: RecordedRun) -> str:
    state = "finished" if run.is_finished else "not finished"
    return f"{state}, {format_duration(run.seconds)} from the first to the last event"


def _heading(run: RecordedRun, count: int) -> str:
    return f"<h3>{_text(run.name)}</h3>" if count > 1 else ""


def _table(header: Sequence[str], rows: Sequence[str]) -> str:
    cells = "".join(f"<th>{_text(name)}</th>" for name in header)
    return f'<div class="table"><table><tr>{cells}</tr>{"".join(rows)}</table></div>'


# -------------------------------------------------------------------------------------------------------- results


def _results(runs: Sequence[RecordedRun]) -> str:
    names = list(dict.fromkeys(name for run in runs for name in run.final))
    if not names:
        return '<p class="missing">No evaluation or end of a round has been recorded yet.</p>'
    rows = []
    for name in names:
        values = [run.final.get(name) for run in runs]
        best = _best(name, values) if len(runs) > 1 else None
        cells = "".join(
            f'<td class="number{" best" if value is not None and value == best else ""}">{_metric(name, value)}</td>'
            for value in values
        )
        rows.append(f"<tr><td>{_text(name.removesuffix(' bytes'))}</td>{cells}</tr>")
    return _table(["", *(run.name for run in runs)] if len(runs) > 1 else ["", "value"], rows)


def _metric(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name.endswith("bytes"):
        return format_bytes(value)
    if name.endswith("seconds"):
        return format_duration(value)
    if value == int(value) and abs(value) < 1e9 and "accuracy" not in name:
        return f"{int(value):,}"
    return format_metric(name.removeprefix("evaluation "), value)


def _best(name: str, values: Sequence[float | None]) -> float | None:
    """The value to mark; None for what is neither better high nor low, or the same everywhere."""
    found = [value for value in values if value is not None]
    if len(set(found)) < 2 or not (name.startswith("evaluation ") or "per second" in name or "loss" in name):
        return None
    is_less = any(word in name for word in _LESS_IS_BETTER) and "per second" not in name
    return min(found) if is_less else max(found)


# --------------------------------------------------------------------------------------------------------- curves


def _curves(runs: Sequence[RecordedRun]) -> str:
    names = list(dict.fromkeys(name for run in runs for name in run.curves))
    training = [name for name in names if not name.startswith("evaluation ")]
    ordered = [name for name in FIRST_CURVES if name in training]
    ordered += [name for name in training if name not in FIRST_CURVES]
    charts = [_chart(name, runs) for name in ordered]
    alone = [name for name in names if name.startswith("evaluation ") and name.split(" ", 1)[1] not in training]
    charts += [_chart(name, runs) for name in alone]
    shown = "".join(chart for chart in charts if chart)
    return f'<div class="charts">{shown}</div>' if shown else ""


def _chart(name: str, runs: Sequence[RecordedRun]) -> str:
    """A number of the steps, and what evaluations say of the same; "" where nothing of it changes."""
    series = []
    for number, run in enumerate(runs):
        here = run.name if len(runs) > 1 else ""
        for curve, words, dashed in ((name, "training", False), (f"evaluation {name}", "evaluation", True)):
            points = run.curves.get(curve, ())
            if any(value is not None for _, value in points):
                both = f"evaluation {name}" in run.curves
                label = " ".join(part for part in (here, words if both else "") if part)
                color = number if len(runs) > 1 else int(dashed)
                series.append(Series(label, points, color % len(COLORS), dashed))
    values = {value for one in series for _, value in one.points}
    if not series or (len(values) == 1 and name not in ("loss",)):
        return ""
    title, series = in_units(name, series)
    return line_chart(title, series)


# ---------------------------------------------------------------------------------------- plan, nodes, settings, notes


def _plan(run: RecordedRun, plan: PlanPicture, count: int) -> str:
    if plan.missing:
        return f'{_heading(run, count)}<p class="missing">{_text(plan.missing)}</p>'
    if not plan.text:
        return ""
    picture = f'<div class="plan">{plan.svg}</div>' if plan.svg else ""
    return (
        f"{_heading(run, count)}{picture}<details{'' if picture else ' open'}><summary>as text</summary>"
        f"<pre>{_text(plan.text)}</pre></details>"
    )


def _nodes(run: RecordedRun, count: int) -> str:
    if not run.nodes:
        return ""
    most = max(node.share for node in run.nodes)
    rows = [
        f'<tr><td class="number">{node.share:.1%}</td>'
        f'<td><span class="bar" style="width:{120 * node.share / most if most else 0:.0f}px"></span></td>'
        f'<td class="number">{1e3 * node.forward_seconds / max(1, node.calls):.3f}</td>'
        f'<td class="number">{1e3 * node.backward_seconds / max(1, node.calls):.3f}</td>'
        f'<td class="number">{node.calls}</td><td>{_text(node.operator)}</td>'
        f"<td><code>{_text(node.name)}</code></td></tr>"
        for node in run.nodes[:MOST_NODES]
    ]
    header = ["share", "", "forward ms per call", "backward ms per call", "calls", "operator", "node"]
    left = len(run.nodes) - MOST_NODES
    more = f'<p class="missing">and {left} more</p>' if left > 0 else ""
    return f"{_heading(run, count)}<p>Profile of {_text(run.profile_name)}.</p>{_table(header, rows)}{more}"


def _rollbacks(run: RecordedRun, count: int) -> str:
    """Spikes of the loss, each with the data that the run left out."""
    rows = [
        "<tr>"
        + "".join(f'<td class="number">{_text(one.get(name, ""))}</td>' for name in ("update", "returned_to"))
        + f"<td>{_text(one.get('cause', ''))}</td>"
        + "".join(f'<td class="number">{_short(one.get(name))}</td>' for name in ("value", "deviations"))
        + f"<td>{_text(one.get('samples', ''))}</td></tr>"
        for one in run.rollbacks
    ]
    header = ["update", "returned to", "spike of", "value", "robust standard deviations", "data left out"]
    return _heading(run, count) + _table(header, rows) if rows else ""


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else _text("" if value is None else value)


def _settings(runs: Sequence[RecordedRun]) -> str:
    """All settings of one run; of several, those that differ, and the common ones folded away."""
    flat = [flatten(run.settings) for run in runs]
    names = sorted({name for one in flat for name in one})
    if not names:
        return ""
    differing = [name for name in names if len({repr(one.get(name)) for one in flat}) > 1]
    rows = {
        name: f"<tr><td><code>{_text(name)}</code></td>"
        + "".join(f"<td>{_text(one.get(name, ''))}</td>" for one in (flat if name in differing else flat[:1]))
        + "</tr>"
        for name in names
    }
    if len(runs) == 1:
        return _table(["field", "value"], list(rows.values()))
    same = _table(["field", "all runs"], [rows[name] for name in names if name not in differing])
    changed = _table(["field", *(run.name for run in runs)], [rows[name] for name in differing])
    top = changed if differing else '<p class="missing">All settings are equal.</p>'
    return f"{top}<details><summary>{len(names) - len(differing)} settings that are equal</summary>{same}</details>"


def _environment(runs: Sequence[RecordedRun]) -> str:
    flat = [flatten(run.environment) for run in runs]
    names = list(dict.fromkeys(name for one in flat for name in one))
    rows = [
        f"<tr><td>{_text(name)}</td>" + "".join(f"<td>{_text(one.get(name, ''))}</td>" for one in flat) + "</tr>"
        for name in names
    ]
    return _table(["", *(run.name for run in runs)], rows) if rows else ""


def _notes(run: RecordedRun, count: int) -> str:
    if not run.messages:
        return ""
    rows = [
        f'<tr><td class="number">{update:,}</td><td>{_text(text).replace(chr(10), "<br>")}</td></tr>'
        for update, text in run.messages
        if "\n" not in text  # the table of a profile, which has its own section
    ]
    return _heading(run, count) + _table(["update", "note"], rows) if rows else ""
