"""The pages of the site, without building it: all are in the navigation, and no link leads out of it."""

from __future__ import annotations

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def site() -> ModuleType:
    loader = SourceFileLoader("dev_site", str(ROOT / "dev" / "site"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation(site: ModuleType) -> None:
    titles = [next(iter(entry)) for entry in site.navigation(site.sources())]
    assert titles == [
        "onward", "Documentation", "Tutorials", "How-to guides", "Reference", "Explanation", "Project"
    ]  # fmt: skip


def test_a_page_that_the_index_does_not_list_is_named(site: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"docs/README.md lists no docs/howto/new.md; add a line to the section"):
        site.navigation([*site.sources(), "docs/howto/new.md"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[speed](../../benchmarks/speed.md#fusion)", "[speed](../../benchmarks/speed.md#fusion)"),
        ("[decisions](../explanation/decisions/)", "[decisions](../explanation/decisions/README.md)"),
        ("see [`runner.py`](../../src/onward/runner.py)", "see `runner.py`"),
        ("![a picture](../pictures/console.png)", "![a picture](../pictures/console.png)"),
        ("[elsewhere](https://example.org), [below](#here)", "[elsewhere](https://example.org), [below](#here)"),
        ("```\n[x](../../src)\n```\n", "```\n[x](../../src)\n```\n"),
    ],
)
def test_links_stay_inside_the_site(site: ModuleType, text: str, expected: str) -> None:
    assert site.relinked("docs/howto/page.md", text, {*site.sources()}) == expected
