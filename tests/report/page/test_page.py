"""The page itself: text of a run is no markup."""

from __future__ import annotations

import re
from pathlib import Path

from onward.report.page.page import PlanPicture, render_page
from onward.report.page.run_record import RecordedRun


def test_text_of_a_run_is_no_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    record = RecordedRun(
        name=evil, folder=tmp_path, messages=[(1, evil)], settings={evil: {evil: evil}}, environment={evil: evil},
        final={f"evaluation {evil}": 1.0}, curves={evil: [(1, 1.0), (2, 2.0)]},
    )  # fmt: skip
    page = render_page([record], {evil: PlanPicture(text=evil)})
    assert evil not in page
    assert page.count("<script") == 2  # one chart's data and the page's own


def test_numbers_as_results_show_them(tmp_path: Path) -> None:
    final = {
        "evaluation accuracy": 1.0, "samples": 12345.0, "peak memory bytes": 2.0**30, "seconds": 61.0,
        "evaluation loss": 0.25, "odd": -0.5,
    }  # fmt: skip
    page = render_page([RecordedRun(name="a", folder=tmp_path, final=final)], {})
    cells = re.findall(r'<td class="number">(.*?)</td>', page)
    assert cells == ["100.00%", "12,345", "1.00 GiB", "1m 01s", "0.2500", "-0.5000"]


def test_the_better_of_two_runs_is_marked_where_there_is_a_better_one(tmp_path: Path) -> None:
    finals = [
        {"evaluation loss": 1.0, "evaluation f1": 0.5, "samples per second": 3.0, "steps": 3.0},
        {"evaluation loss": 2.0, "evaluation f1": 0.7, "samples per second": 5.0, "steps": 4.0},
    ]
    runs = [RecordedRun(name=str(n), folder=tmp_path, final=final) for n, final in enumerate(finals)]
    rows = re.findall(r"<tr><td>([a-z0-9 ]+)</td>(.*?)</tr>", render_page(runs, {}))
    marked = {name: re.findall(r'number( best)?">', cells) for name, cells in rows if "number" in cells}
    best = {name: marks.index(" best") if " best" in marks else None for name, marks in marked.items()}
    assert best == {"evaluation loss": 0, "evaluation f1": 1, "samples per second": 1, "steps": None}
