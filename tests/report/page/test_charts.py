"""Charts: ticks, thinning, gaps, scales."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.report.page.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Series,
    line_chart,
    round_ticks,
    thin_out,
    tick_labels,
)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 300, [0, 100, 200, 300]),
        (-0.3, 0.31, [-0.2, 0, 0.2]),
        (1999, 2001, [1999, 1999.5, 2000, 2000.5, 2001]),
        (5, 5, [5]),
    ],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert round_ticks(low, high) == ticks


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_lie_inside_and_are_few(low: float, width: float) -> None:
    high = low + width
    if high <= low:
        return
    ticks = round_ticks(low, high)
    slack = 1e-6 * max(abs(low), abs(high), 1)
    assert 1 <= len(ticks) <= 7
    assert all(low - slack <= tick <= high + slack for tick in ticks)


@given(st.lists(st.one_of(st.none(), st.floats(-1e9, 1e9)), min_size=1, max_size=3000))
def test_thinning_keeps_ends_extremes_and_gaps(values: list[float | None]) -> None:
    points = list(enumerate(values))
    kept = thin_out(points, 120)
    assert kept == sorted(kept, key=lambda point: point[0])
    assert set(kept) <= set(points)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    finite = [value for value in values if value is not None]
    if finite:
        shown = [value for _, value in kept if value is not None]
        assert (min(shown), max(shown)) == (min(finite), max(finite))
    assert sum(value is None for _, value in kept) == sum(value is None for value in values)
    assert len([1 for _, value in kept if value is not None]) <= 160


def svg_of(chart: str) -> ElementTree.Element:
    (text,) = re.findall(r"<svg.*?</svg>", chart)
    return ElementTree.fromstring(text)


def test_lines_stay_inside_and_break_at_gaps() -> None:
    points = [(1, 1.0), (2, 3.0), (3, None), (4, 2.0), (5, 2.5)]
    svg = svg_of(line_chart("Loss <b>", [Series("a", points), Series("b", [(3, 9.0)], 1)]))
    paths = [path.attrib["d"] for path in svg.iter("path")]
    assert len(paths) == 2  # before and after the gap; the single point is a circle
    assert len(list(svg.iter("circle"))) == 1
    for x, y in re.findall(r"([\d.]+),([\d.]+)", "".join(paths)):
        assert LEFT <= float(x) <= WIDTH - RIGHT
        assert TOP <= float(y) <= HEIGHT - BOTTOM
    assert svg.attrib["aria-label"] == "Loss <b>"


def test_values_of_many_sizes_get_a_logarithmic_axis() -> None:
    wide = line_chart("a", [Series("", [(1, 1.0), (2, 1000.0)])])
    assert "logarithmic" in wide
    assert "logarithmic" not in line_chart("a", [Series("", [(1, 1.0), (2, 50.0)])])
    assert "logarithmic" not in line_chart("a", [Series("", [(1, 0.0), (2, 1000.0)])])
    labels = [text.text for text in svg_of(wide).iter("text")]
    assert {"1", "10", "100", "1,000"} <= set(labels)


def test_data_cannot_end_the_script() -> None:
    chart = line_chart("a", [Series("</script><script>alert(1)</script>", [(1, 1.0), (2, 2.0)])])
    assert chart.count("<script") == 1
    (data,) = re.findall(r"<script type=.application/json.>(.*?)</script>", chart)
    assert json.loads(data)["series"][0]["name"] == "</script><script>alert(1)</script>"


@pytest.mark.parametrize(
    ("ticks", "labels"),
    [
        ([0.0, 500_000.0, 1e6, 1.5e6], ["0", "500,000", "1M", "1.5M"]),
        ([612.0, 612.05, 612.1], ["612", "612.05", "612.1"]),
        ([1e-7, 1e-5], ["1e-07", "1e-05"]),
        ([2e9, 4e9], ["2G", "4G"]),
    ],
)
def test_ticks_can_be_told_apart(ticks: list[float], labels: list[str]) -> None:
    assert tick_labels(ticks) == labels
