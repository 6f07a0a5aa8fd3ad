"""A plan as a picture: every rank's memory as a bar of kinds, and the timeline of the pipeline; written as SVG.

The picture is a list of rectangles and texts first, so that it can be drawn by others, too.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from onward.plan.decision import Plan
from onward.plan.memory import KINDS, Forecast
from onward.plan.pipeline.schedules import Span
from onward.plan.report.text import ranks_at, verdict
from onward.tables import bytes_text

WIDTH = 1000
_LEFT, _ROW, _BAR = 130, 22, 770
_MOST_LETTERS = 150
COLORS = {
    "weights": "#3b6ea5", "gathered weights": "#7fa7d1", "low-precision copies": "#a9c5e3", "gradients": "#d1813c",
    "moments": "#8c6bb1", "averages": "#b5651d", "outer optimizer": "#c98f4e", "masks": "#7a7a52",
    "activations": "#5a9e6f", "constants": "#9a9a9a", "communication": "#c9b458",
    "working memory": "#cc6677", "frozen weights": "#4fa3a5",
}  # fmt: skip
_NAMES = {"gathered weights": "all-gathered weights", "working memory": "temporary"}
_FORWARD, _BACKWARD, _WEIGHT = ("#8fb8de", "#5c93c7"), ("#e3a574", "#c77f43"), ("#c3b1d9", "#9d86bf")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A rectangle with its upper left corner at (x, y); one of width 0 is only the text at that corner."""

    x: float
    y: float
    width: float = 0.0
    height: float = 0.0
    color: str = "#222222"
    text: str = ""
    size: int = 12


def picture(title: str, plan: Plan, forecast: Forecast, memory_limit_bytes: float | None) -> tuple[list[Shape], int]:
    """What is to be drawn, and how high the picture is."""
    shapes = [Shape(x=20, y=14, text=title, size=18)]
    y = 50.0
    shapes += list(_legend(forecast, y))
    y += 30
    most = max([*(rank.memory.total for rank in forecast.ranks), memory_limit_bytes or 0.0])
    top = y
    for rank in forecast.ranks:
        shapes.append(Shape(x=20, y=y + 3, text=ranks_at(plan.topology, rank.pipeline)))
        x = float(_LEFT)
        for kind in KINDS:
            width = rank.memory.kinds[kind] / most * _BAR
            if width > 0.2:
                shapes.append(Shape(x=x, y=y, width=width, height=_ROW - 6, color=COLORS[kind]))
                x += width
        shapes.append(Shape(x=min(x + 6, WIDTH - 70), y=y + 3, text=bytes_text(rank.memory.total), size=11))
        y += _ROW
    if memory_limit_bytes is not None:
        shapes.append(
            Shape(
                x=_LEFT + memory_limit_bytes / most * _BAR - 1, y=top - 4, width=2, height=y - top + 4, color="#b00020"
            )
        )
    y += 8
    for line in textwrap.wrap(verdict(forecast, plan, memory_limit_bytes), _MOST_LETTERS):
        shapes.append(Shape(x=20, y=y, text=line))
        y += 17
    y += 19
    if forecast.timeline is not None:
        share = f"{forecast.timeline.bubble_share:.1%} of the time is idle"
        shapes.append(Shape(x=20, y=y, text=f"One update, {plan.schedule}: {share}", size=14))
        y += 26
        for index, spans in enumerate(forecast.timeline.ranks):
            shapes.append(Shape(x=20, y=y + 3, text=ranks_at(plan.topology, index)))
            shapes.append(Shape(x=_LEFT, y=y, width=_BAR, height=_ROW - 4, color="#eeeeee"))
            first = min((span.action.stage for span in spans), default=0)
            shapes += [_box(span, y, forecast.timeline.seconds, span.action.stage != first) for span in spans]
            y += _ROW
        y += 8
        names = ("forward", "backward", "gradients of weights", "idle")
        colors = (_FORWARD[0], _BACKWARD[0], _WEIGHT[0], "#eeeeee")
        keys = zip(names, colors, strict=True)
        for place, (name, color) in enumerate(keys):
            shapes += [
                Shape(x=_LEFT + 150 * place, y=y, width=12, height=12, color=color),
                Shape(x=_LEFT + 150 * place + 18, y=y - 1, text=name),
            ]
        y += 24
    return shapes, int(y + 16)


def _legend(forecast: Forecast, y: float) -> Iterator[Shape]:
    x = 20.0
    for kind in KINDS:
        if any(rank.memory.kinds[kind] for rank in forecast.ranks):
            yield Shape(x=x, y=y, width=12, height=12, color=COLORS[kind])
            text = _NAMES.get(kind, kind)
            yield Shape(x=x + 17, y=y - 1, text=text, size=11)
            x += 32 + 6.2 * len(text)


def _box(span: Span, y: float, seconds: float, second: bool) -> Shape:
    colors = {"forward": _FORWARD, "backward_weight": _WEIGHT}.get(span.action.kind, _BACKWARD)
    left, right = span.start / seconds * _BAR, span.end / seconds * _BAR
    text = str(span.action.micro_batch) if right - left > 14 else ""
    return Shape(
        x=_LEFT + left,
        y=y,
        width=max(right - left - 0.6, 0.4),
        height=_ROW - 4,
        color=colors[second],
        text=text,
        size=10,
    )


def to_svg(shapes: list[Shape], height: int) -> str:
    """The picture as an SVG document."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for shape in shapes:
        if shape.width:
            lines.append(
                f'<rect x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" height="{shape.height:.1f}" '
                f'fill="{shape.color}"/>'
            )
        if shape.text:
            x, y = text_corner(shape)
            color = "#222222" if shape.width else shape.color
            lines.append(
                f'<text x="{x:.1f}" y="{y + shape.size * 0.85:.1f}" font-size="{shape.size}" fill="{color}">'
                f"{escape(shape.text)}</text>"
            )
    return "\n".join([*lines, "</svg>"]) + "\n"


def text_corner(shape: Shape) -> tuple[float, float]:
    """Where the text of a shape begins: in the middle of its rectangle, or at its corner."""
    if not shape.width:
        return shape.x, shape.y
    half = len(shape.text) * shape.size * 0.28
    return shape.x + shape.width / 2 - half, shape.y + (shape.height - shape.size) / 2
