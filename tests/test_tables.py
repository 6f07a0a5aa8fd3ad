"""Tables for terminals and notebooks: alignment, escaping, curves, sizes."""

from __future__ import annotations

import pytest

from onward.tables import aligned, bytes_text, html_curve, html_table


def test_tables() -> None:
    rows = [("name", "size"), ("a<b>", "10"), ("c", "2")]
    assert aligned(rows, right={1}) == ["name  size", "a<b>    10", "c        2"]
    assert "a&lt;b&gt;" in html_table(rows)
    assert [bytes_text(size) for size in (0, 999, 1000, 4_640, 2.5e9, 7e15)] == [
        "0 B", "999 B", "1 kB", "4.64 kB", "2.5 GB", "7e+03 TB",
    ]  # fmt: skip
    assert html_curve("loss", [1.0]) == ""
    curve = html_curve("loss", [3.0, float("nan"), 1.0, 2.0])
    assert curve.count(",") == 3  # what is not finite is left out
    assert ">3<" in curve
    assert ">1<" in curve


@pytest.mark.parametrize(
    ("size", "text"),
    [(0.4, "0.4 B"), (999.4, "999 B"), (999.7, "1 kB"), (999_499, "999 kB"), (999_600, "1 MB"), (999.9e9, "1 TB")],
)
def test_sizes_that_are_rounded_up_to_the_next_unit(size: float, text: str) -> None:
    assert bytes_text(size) == text


def test_a_table_of_a_heading_alone_and_a_curve_of_equal_values() -> None:
    assert aligned([("1", "2")], head=("a", "größe")) == ["a  größe", "1  2"]
    assert aligned([], head=("a", "größe")) == []
    assert ">2<" in html_curve("x", [2.0, 2.0])
    assert html_curve("x", [float("nan")] * 3) == html_curve("x", []) == ""
