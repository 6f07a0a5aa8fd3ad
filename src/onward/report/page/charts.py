"""Line charts as SVG: axes with round numbers, one line a series, gaps where a value is not finite.

The points go along as JSON, so that the page's script can show values under the pointer; the chart needs no script.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 520, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 14, 30
MOST_POINTS = 600
"""Of a series; more are thinned out, with the smallest and the largest value of every stretch kept."""
LOGARITHMIC_RATIO = 100.0
"""Positive values that span more than this are drawn on a logarithmic axis."""

COLORS = ("#3366cc", "#dc6a12", "#2a9d5c", "#b8336a", "#7a52c7", "#0d9aa8", "#9a7b1a", "#6b7280")
"""Distinct for the most common kinds of colour blindness in their first four."""


@dataclass(frozen=True)
class Series:
    """One line.

    Attributes:
        name: in the legend.
        points: (update, value), in order of update; None breaks the line.
        color: of `COLORS`, by number.
        is_dashed: drawn dashed, as evaluations are next to training.
    """

    name: str
    points: Sequence[tuple[int, float | None]]
    color: int = 0
    is_dashed: bool = False


def thin_out(points: Sequence[tuple[int, float | None]], most: int = MOST_POINTS) -> list[tuple[int, float | None]]:
    """At most about `most` points; every stretch keeps its first, smallest and largest value and its gaps."""
    if len(points) <= most:
        return list(points)
    length = math.ceil(len(points) / (most // 3))
    kept: list[tuple[int, float | None]] = []
    for start in range(0, len(points), length):
        stretch = points[start : start + length]
        values = [(value, place) for place, (_, value) in enumerate(stretch) if value is not None]
        places = {0, len(stretch) - 1} if start + length >= len(points) else {0}
        places |= {min(values)[1], max(values)[1]} if values else set()
        places |= {place for place, (_, value) in enumerate(stretch) if value is None}
        kept += [stretch[place] for place in sorted(places)]
    return kept


def round_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that are in a range, about `count` of them."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def line_chart(title: str, series: Sequence[Series]) -> str:
    """The chart as a `figure` element.

    Args:
        title: above it.
        series: at least one, each with at least one finite value.
    """
    values = [value for one in series for _, value in one.points if value is not None]
    updates = [update for one in series for update, _ in one.points]
    low, high = min(values), max(values)
    is_log = low > 0 and high / low > LOGARITHMIC_RATIO
    across = _Axis(min(updates), max(updates), LEFT, WIDTH - RIGHT)
    up = _Axis(*_padded(low, high, is_log), HEIGHT - BOTTOM, TOP, is_log)
    parts = [*_grid(across, up)]
    for one in series:
        style = ' stroke-dasharray="5 3"' if one.is_dashed else ""
        color = COLORS[one.color % len(COLORS)]
        for path in _paths(thin_out(one.points), across, up):
            parts.append(f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.6"{style}/>')
        finite = [point for point in one.points if point[1] is not None]
        if len(finite) == 1:
            x, y = across.place(finite[0][0]), up.place(float(finite[0][1] or 0))
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>')
    note = ' <span class="scale">logarithmic</span>' if is_log else ""
    return (
        f'<figure class="chart"><figcaption>{html.escape(title)}{note}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">{"".join(parts)}'
        f'<line class="pointer" y1="{TOP}" y2="{HEIGHT - BOTTOM}" visibility="hidden"/></svg>'
        f'{_legend(series)}<div class="values" hidden></div>'
        f'<script type="application/json">{_data(series, across)}</script></figure>'
    )


class _Axis:
    """Values of a range to pixels."""

    def __init__(self, low: float, high: float, begin: float, end: float, is_log: bool = False) -> None:
        self.low, self.high, self.is_log = low, high, is_log
        self._begin, self._end = begin, end

    def place(self, value: float) -> float:
        """The pixel of a value."""
        low, high, here = (
            (math.log10(self.low), math.log10(self.high), math.log10(value))
            if self.is_log
            else (self.low, self.high, value)
        )
        share = 0.5 if high == low else (here - low) / (high - low)
        return self._begin + share * (self._end - self._begin)

    def ticks(self) -> list[float]:
        """Round values of the range."""
        if not self.is_log:
            return round_ticks(self.low, self.high)
        powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
        stride = max(1, len(powers) // 6)
        return [10.0**power for power in powers][::stride]


def _padded(low: float, high: float, is_log: bool) -> tuple[float, float]:
    if is_log:
        return low / 1.2, high * 1.2
    margin = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    # An axis of what is never negative does not begin below 0.
    return (max(low - margin, 0.0) if low >= 0 else low - margin), high + margin


def _grid(across: _Axis, up: _Axis) -> list[str]:
    parts = []
    rows, columns = up.ticks(), across.ticks()
    for value, label in zip(rows, tick_labels(rows), strict=True):
        y = up.place(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for value, label in zip(columns, tick_labels(columns), strict=True):
        x = across.place(value)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{label}</text>')
    parts.append(f'<text class="unit" x="{WIDTH - RIGHT}" y="{HEIGHT - 2}" text-anchor="end">updates</text>')
    return parts


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """`0.05`, `12,000`, `2.5M`, `1e-07`; with as many digits as it takes to distinguish neighbors."""
    labels: list[str] = []
    for digits in range(3, 12):
        labels = [_short(value, digits) for value in ticks]
        if len(set(labels)) == len(ticks):
            break
    return labels


def _short(value: float, digits: int) -> str:
    for factor, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if factor <= abs(value) < 1e15:
            return f"{value / factor:.{digits}g}{suffix}"
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e6 else f"{value:.{digits}g}"


def _paths(points: Sequence[tuple[int, float | None]], across: _Axis, up: _Axis) -> list[str]:
    """A path for each stretch without a gap."""
    paths, here = [], list[str]()
    for update, value in points:
        if value is None:
            if len(here) > 1:
                paths.append("M" + "L".join(here))
            here = []
        else:
            here.append(f"{across.place(update):.1f},{up.place(value):.1f}")
    return [*paths, "M" + "L".join(here)] if len(here) > 1 else paths


def _legend(series: Sequence[Series]) -> str:
    if len(series) == 1 and not series[0].name:
        return ""
    items = "".join(
        f'<li><i style="border-top: 3px {style} {COLORS[one.color % len(COLORS)]}"></i>{html.escape(one.name)}</li>'
        for one in series
        for style in ("dashed" if one.is_dashed else "solid",)
    )
    return f'<ul class="legend">{items}</ul>'


def _data(series: Sequence[Series], across: _Axis) -> str:
    """For the script: the range of updates in pixels, and every series' points. Safe inside of a script element."""
    data = {
        "low": across.low,
        "high": across.high,
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "width": WIDTH,
        "series": [
            {
                "name": one.name,
                "color": COLORS[one.color % len(COLORS)],
                "points": [[update, None if value is None else float(f"{value:.6g}")] for update, value in
                           thin_out(one.points)],
            }
            for one in series
        ],
    }  # fmt: skip
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
