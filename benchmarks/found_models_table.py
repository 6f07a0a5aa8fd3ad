"""Rows of found files as a line and as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PHASES = ("inspect", "runs", "loads", "outputs", "trains", "exports", "init")
_MARKS = {True: "yes", False: "**no**", None: "-"}


def summary(row: dict[str, Any]) -> str:
    """One line for the terminal: verdicts, and what failed."""
    phases = row["phases"]
    marks = " ".join(f"{name}={_verdict(phases.get(name))}" for name in PHASES)
    failed = [f"    {name}: {one['text']}" for name, one in phases.items() if one["ok"] is False]
    return "\n".join([f"{row['file']}: {marks} {row.get('ended', '')}", *failed])


def _verdict(phase: dict[str, Any] | None) -> str:
    return "-" if phase is None or phase["ok"] is None else ("ok" if phase["ok"] else "NO")


def table(rows: Sequence[dict[str, Any]], cache: Path) -> str:
    """The table in Markdown."""
    lines = ["| file | from | inspect | outputs | 30 updates | export | init |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        phases = row["phases"]
        cells = [_cell(phases.get(name)) for name in ("outputs", "trains", "exports", "init")]
        inspect = phases.get("inspect", {})
        seconds = f"{inspect['seconds']:.1f} s" if inspect.get("ok") else "**no**"
        folder, _, name = row["file"].partition("/")
        lines.append(f"| {name} | {_origin(cache, folder)} | {seconds} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(phase: dict[str, Any] | None) -> str:
    if phase is None:
        return "-"
    text = phase["text"].replace("|", "\\|").replace("\n", " ")
    return f"{_MARKS[phase['ok']]}: {text[:160]}"


def _origin(cache: Path, folder: str) -> str:
    path = cache / "files" / folder / "origin.json"
    if not path.exists():
        return folder
    origin = json.loads(path.read_text())
    return f"{origin['package']} {origin['version']}"
