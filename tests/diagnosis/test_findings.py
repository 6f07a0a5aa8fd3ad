"""Findings as text and as JSON."""

from __future__ import annotations

import json

from onward.diagnosis.findings import Finding, render, to_json


def test_findings_as_text_and_json() -> None:
    found = [Finding("disk", "full", "note", "Free space."), Finding("versions", "fine")]
    assert render(found) == (
        "disk      note     full\n                   -> Free space.\nversions  ok       fine\n\n0 problems, 1 note"
    )
    assert json.loads(to_json(found)) == {
        "ok": True,
        "findings": [
            {"topic": "disk", "text": "full", "status": "note", "remedy": "Free space."},
            {"topic": "versions", "text": "fine", "status": "ok", "remedy": ""},
        ],
    }
