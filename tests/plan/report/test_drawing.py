"""A picture as SVG: rectangles, texts in their middle, and names that are no markup."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from onward.plan.memory import KINDS
from onward.plan.report.drawing import COLORS, WIDTH, Shape, text_corner, to_svg


def test_rectangles_and_texts() -> None:
    shapes = [
        Shape(x=1.25, y=2, width=10, height=20, color="#123456", text="7", size=10),
        Shape(x=3, y=4, text="<a> & b"),
    ]
    root = ElementTree.fromstring(to_svg(shapes, 90))
    assert (root.attrib["width"], root.attrib["height"]) == (str(WIDTH), "90")
    tags = [one.tag.rpartition("}")[2] for one in root]
    assert tags == ["rect", "rect", "text", "text"]
    assert root[1].attrib["fill"] == "#123456"
    assert [one.text for one in root[2:]] == ["7", "<a> & b"]
    assert root[2].attrib["fill"] == "#222222"  # on its rectangle


def test_where_a_text_begins() -> None:
    assert text_corner(Shape(x=5, y=6, text="abc")) == (5, 6)
    x, y = text_corner(Shape(x=0, y=0, width=100, height=20, text="ab", size=10))
    assert 40 < x < 50
    assert y == 5


def test_every_kind_of_memory_has_its_own_color() -> None:
    assert set(KINDS) <= set(COLORS)
    assert len(set(COLORS.values())) == len(COLORS)
