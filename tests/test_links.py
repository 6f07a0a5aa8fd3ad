"""Every relative link of every page leads to a file that exists, and to a heading that is there; without network."""

from __future__ import annotations

import json
import re
import subprocess
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", re.MULTILINE)
_MENTION = re.compile(r"(?<![\w./-])(?:docs|benchmarks|recipes)/[\w./-]+\.(?:md|ipynb|png|svg)\b")
_SOURCE = re.compile(r"`((?:[\w*.-]+/)*[\w*-]+\.py|(?:src|tests|benchmarks|dev|recipes)/[\w/.-]+)(?:::\w+)?`")
_TEST = re.compile(r"\btests/[\w/]+\.py\b")
# Pages of other projects whose paths look like ours.
_ELSEWHERE = {"docs/ContribOperators.md", "docs/torchft.md", "docs/debugging.md"}
# Tests that invent pages.
_INVENTING = {Path(__file__), ROOT / "tests" / "test_site.py"}


def tracked(*patterns: str) -> list[Path]:
    """The files under version control, without those that were deleted just now."""
    names = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in names.splitlines() if (path := ROOT / name).is_file()]


def text_of(page: Path) -> str:
    """The Markdown of a page or of a notebook's text cells, without its code blocks."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    return _FENCE.sub("", text)


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and the site (pymdownx.slugs) form it."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


@cache
def anchors(page: Path) -> frozenset[str]:
    """What a link into a page may name after its `#`; a heading that occurs again gets a number."""
    found: list[str] = []
    for heading in _HEADING.findall(text_of(page)):
        base = slug(heading)
        again = sum(1 for one in found if re.fullmatch(rf"{re.escape(base)}(-\d+)?", one))
        found.append(f"{base}-{again}" if again else base)
    return frozenset(found)


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    faults = []
    for target in _LINK.findall(text_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        aim = (page.parent / path).resolve() if path else page
        if not aim.exists() or not aim.is_relative_to(ROOT):
            faults.append(f"{page.relative_to(ROOT)}: {target} does not exist")
        elif anchor and aim.suffix == ".md" and anchor not in anchors(aim):
            faults.append(f"{page.relative_to(ROOT)}: {target} names no heading of {aim.relative_to(ROOT)}")
    return faults


def test_links_lead_somewhere() -> None:
    pages = tracked("*.md", "*.ipynb")
    assert len(pages) > 50
    assert not [fault for page in pages for fault in broken(page)]


def test_pages_that_code_and_messages_name_exist() -> None:
    """A page that was moved is named under its new path by messages, docstrings, tests and scripts, too."""
    faults = []
    for path in tracked("*.py", "*.md", "*.toml", "Makefile", "dev/*", ".ci/*"):
        for name in _MENTION.findall(path.read_text(encoding="utf-8", errors="ignore")):
            if name not in _ELSEWHERE and not (ROOT / name).exists() and path not in _INVENTING:
                faults.append(f"{path.relative_to(ROOT)} names {name}")
    assert not faults


def test_sources_and_tests_that_pages_name_exist() -> None:
    """A file that pages name in backticks, by its path or the end of it, is in the project; patterns match one."""
    files = [str(path.relative_to(ROOT)) for path in tracked()]
    faults = []
    for page in tracked("*.md", ".ci/*", "Makefile"):
        text = page.read_text(encoding="utf-8")
        pattern = _SOURCE if page.suffix == ".md" else _TEST
        if page.name != "log.md":  # which tells what was
            named = {name for name in pattern.findall(text) if not any(_ends_with(one, name) for one in files)}
            faults += [f"{page.relative_to(ROOT)} names {name}" for name in sorted(named)]
    assert not faults


def test_tests_that_pages_name_are_defined() -> None:
    named = [
        (page, *found)
        for page in tracked("*.md")
        for found in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text(encoding="utf-8"))
    ]
    assert named
    for page, file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{page.name} names {file}::{name}"


def _ends_with(path: str, name: str) -> bool:
    return path.startswith(name) or fnmatchcase(f"/{path}", f"*/{name}")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[a](gone.md)", "page.md: gone.md does not exist"),
        ("[a](#nowhere)", "page.md: #nowhere names no heading of page.md"),
        ("[a `b` [c]](gone.md#x)", "page.md: gone.md#x does not exist"),
        ("# `onward plan`: a page\n[a](#onward-plan-a-page)", None),
        ("# One\n# One\n[a](#one-1)", None),
        ("```\n[a](gone.md)\n```\n[a](https://example.org/x.md)", None),
    ],
)
def test_broken_links_are_found(text: str, fault: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(text)
    assert broken(page) == ([fault] if fault else [])
