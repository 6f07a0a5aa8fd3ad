"""The report of runs: short names that differ, where it is written, and plans that cannot be made again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onward.commands import reporting
from onward.commands.reporting import write_report
from onward.errors import StorageError


def run_in(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(json.dumps({"kind": "step", "update": 1, "loss": 1.0}) + "\n")
    return folder


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["/a/x"], ["x"]),
        (["/a/x", "/a/y"], ["x", "y"]),
        (["/a/x", "/b/x"], ["a/x", "b/x"]),
        (["/a/x", "/b/x", "/b/y"], ["a/x", "b/x", "b/y"]),
        (["/a/x", "/a/x"], ["x (1)", "x (2)"]),
    ],
)
def test_short_names_that_differ(folders: list[str], names: list[str]) -> None:
    assert reporting._names([Path(one) for one in folders]) == names


def test_where_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = run_in(tmp_path / "a"), run_in(tmp_path / "b")
    assert write_report([first]) == first / "report.html"
    assert "There is no plan: the run&#x27;s parameters are not in its folder." in (first / "report.html").read_text()
    monkeypatch.chdir(tmp_path)
    assert write_report([first, second], with_plan=False) == Path("report.html")
    assert "2 runs" in (tmp_path / "report.html").read_text()
    with pytest.raises(StorageError, match=r"the report .* cannot be written: .* Name another file with -o\."):
        write_report([first], first / "metrics.jsonl" / "page.html", with_plan=False)


def test_settings_that_no_run_has_any_more(tmp_path: Path) -> None:
    folder = run_in(tmp_path / "a")
    (folder / "resolved.yaml").write_text("training: {gone: 1}")
    write_report([folder])
    assert "There is no plan: " in (folder / "report.html").read_text()
