"""Pictures as .svg and .png; other types, and files that cannot be written, are refused."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from onward.commands.pictures import checked_image, write_image
from onward.errors import ParametersError, StorageError
from onward.plan.report.drawing import WIDTH, Shape

SHAPES = [Shape(x=10, y=10, width=20, height=8, color="#3b6ea5", text="<b>"), Shape(x=5, y=30, text="größe & more")]


def test_svg(tmp_path: Path) -> None:
    write_image(tmp_path / "a.svg", SHAPES, 50)
    texts = [one.text for one in ElementTree.parse(tmp_path / "a.svg").getroot().iter() if one.tag.endswith("text")]
    assert texts == ["<b>", "größe & more"]
    assert [one.name for one in tmp_path.iterdir()] == ["a.svg"]


def test_png(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    write_image(tmp_path / "a.PNG", SHAPES, 50)
    with image.open(tmp_path / "a.PNG") as picture:
        assert picture.size == (2 * WIDTH, 100)
        assert picture.getpixel((22, 22)) == (0x3B, 0x6E, 0xA5)


def test_png_needs_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ParametersError, match=r"writing PNG needs pillow\. Run pip install pillow, or write an \.svg"):
        write_image(tmp_path / "a.png", SHAPES, 50)
    assert not list(tmp_path.iterdir())


def test_types_and_places(tmp_path: Path) -> None:
    assert checked_image(Path("a.SVG")) == Path("a.SVG")
    for name in ("a.jpg", "svg", "a.svg.gz"):
        with pytest.raises(ParametersError, match=r"expected a file that ends in \.svg or \.png"):
            checked_image(Path(name))
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written: "):
        write_image(tmp_path / "file" / "a.svg", SHAPES, 50)
