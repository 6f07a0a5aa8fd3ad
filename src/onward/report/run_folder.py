"""The folder of a run as others read it: `run.json`, its record. Nothing here needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onward.untrusted_files import parse_json, read_text

RECORD_NAME, RESOLVED_NAME = "run.json", "resolved.yaml"


def read_record(folder: Path, name: str = RECORD_NAME) -> dict[str, Any] | None:
    """`run.json` of a folder, or another file of a run's that holds a JSON object; None: none that can be read."""
    try:
        found = parse_json(read_text(folder / name))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
