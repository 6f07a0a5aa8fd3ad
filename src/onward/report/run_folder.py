"""The folder of a run as others read it: `run.json`, its record. Nothing here needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onward.untrusted_files import parse_json, read_text

RECORD_NAME, RESOLVED_NAME = "run.json", "resolved.yaml"


def read_record(folder: Path) -> dict[str, Any] | None:
    """`run.json` of a folder; None: there is none that can be read."""
    try:
        found = parse_json(read_text(folder / RECORD_NAME))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
