"""Tables for people: aligned text for terminals, HTML for notebooks."""

from __future__ import annotations

import html
import math
from collections.abc import Collection, Iterable, Sequence

_CELL = (
    "padding: 2px 12px 2px 0; text-align: {}; vertical-align: top; white-space: pre-wrap; overflow-wrap: anywhere; "
    "max-width: 60em"
)
"""Colors are those of the page around it, light or dark."""


def aligned(rows: Iterable[Sequence[str]], right: Collection[int] = (), head: Sequence[str] = ()) -> list[str]:
    """Rows as lines with columns side by side, those in `right` aligned to the right; no heading without rows."""
    cells = [list(row) for row in rows]
    if cells and head:
        cells.insert(0, list(head))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def section(title: str, lines: Iterable[str]) -> str:
    """A title with its lines below; nothing without lines."""
    below = [f"  {line}".rstrip() for line in lines]
    return "\n".join([title, *below]) if below else ""


def html_table(rows: Iterable[Sequence[str]], right: Collection[int] = (), caption: str = "") -> str:
    """The same as an HTML table."""
    heading, *body = [list(row) for row in rows]
    parts = [f"<caption>{html.escape(caption)}</caption>" if caption else ""]
    for tag, lines in (("th", [heading]), ("td", body)):
        for line in lines:
            cells = (
                f'<{tag} style="{_CELL.format("right" if column in right else "left")}">{html.escape(cell)}</{tag}>'
                for column, cell in enumerate(line)
            )
            parts.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div style="overflow-x: auto"><table class="onward">{"".join(parts)}</table></div>'


def html_fields(title: str, fields: Iterable[tuple[str, str]]) -> str:
    """Names and values as a table of two columns."""
    return html_table([(title, ""), *fields])


def html_curve(title: str, values: Sequence[float], width: int = 480, height: int = 120) -> str:
    """Numbers as a line, with the highest and the lowest at its side; those that are not finite are left out."""
    points = [(index, value) for index, value in enumerate(values) if math.isfinite(value)]
    if len(points) < 2:
        return ""
    low, high = min(value for _, value in points), max(value for _, value in points)
    across, up = width / max(1, len(values) - 1), height / ((high - low) or 1.0)
    line = " ".join(f"{index * across:.1f},{8 + height - (value - low) * up:.1f}" for index, value in points)
    labels = "".join(
        f'<text x="{width + 6}" y="{y}" font-size="11" fill="currentColor">{value:.4g}</text>'
        for value, y in ((high, 12), (low, height + 12))
    )
    style = f"width: {width + 70}px; max-width: 100%"
    return (
        f'<figure class="onward" style="margin: 0"><figcaption>{html.escape(title)}</figcaption>'
        f'<svg viewBox="0 0 {width + 70} {height + 16}" style="{style}">'
        f'<polyline points="{line}" fill="none" stroke="#1f77b4" stroke-width="1.5"/>{labels}</svg></figure>'
    )


def bytes_text(size: float) -> str:
    """A size in the unit that reads best: `512 B`, `1.5 MB`."""
    units = ("B", "kB", "MB", "GB", "TB")
    # 999.5 would be rounded to 1e+03.
    power = next((n for n in range(len(units)) if size < 999.5 * 1000**n), len(units) - 1)
    return f"{size / 1000**power:.3g} {units[power]}"
