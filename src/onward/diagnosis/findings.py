"""What a check found: a line of text, whether it is well, and what to do where it is not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "problem"]
"""`note`: onward works, but slower or with less; `problem`: something it needs does not work."""

_MARKS = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        topic: what was looked at, such as `versions` or `disk`.
        text: what was found, with its numbers.
        status: whether it is well.
        remedy: what to do, in the imperative; "" if there is no problem.
    """

    topic: str
    text: str
    status: Status = "ok"
    remedy: str = ""


def render(findings: Sequence[Finding]) -> str:
    """The report as aligned text, a remedy below the line that it is for."""
    width = max(len(finding.topic) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.topic:<{width}}  {_MARKS[finding.status]:<7}  {finding.text}")
        if finding.remedy:
            lines.append(f"{'':<{width}}           -> {finding.remedy}")
    counts = {status: sum(finding.status == status for finding in findings) for status in ("problem", "note")}
    plural = {name: "" if count == 1 else "s" for name, count in counts.items()}
    lines += ["", f"{counts['problem']} problem{plural['problem']}, {counts['note']} note{plural['note']}"]
    return "\n".join(lines)


def to_json(findings: Sequence[Finding]) -> str:
    """The same as one JSON object, for programs."""
    is_ok = all(finding.status != "problem" for finding in findings)
    return json.dumps({"ok": is_ok, "findings": [dataclasses.asdict(finding) for finding in findings]}, indent=2)
