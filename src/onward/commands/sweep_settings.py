"""The settings that each run of a sweep was started with, kept in its folder, so that later ones can be compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onward.errors import ParametersError, StorageError
from onward.exclusive.temporary import replacing
from onward.parameters import Parameters
from onward.parameters.changes import REPORTS_AND_PLACES, changed_fields, flat_fields, sentences_on_changes
from onward.report.run_folder import read_record
from onward.spelling import shortened

FILE_NAME = "sweep.json"
_SHOWN = 5


def settings_of(parameters: Parameters, base: Path) -> dict[str, Any]:
    """Fields that may change a result -> values; paths relative to the folder of RUN.yaml."""
    fields = dict(flat_fields(parameters.to_mapping(), base=f"{base.resolve()}/"))
    return {name: value for name, value in fields.items() if not name.startswith(REPORTS_AND_PLACES)}


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Keeps the settings of a run that begins.

    Raises:
        StorageError: they cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / FILE_NAME) as unfinished:
            unfinished.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"the folder {str(folder)!r} of a run of the sweep cannot be written: {error.strerror or error}. Make "
            "room, or set another paths.output_dir."
        ) from error


def refuse_changed(members: Mapping[Path, Mapping[str, Any]]) -> None:
    """Refuses a sweep some of whose runs were begun with other settings; those that failed start over.

    Args:
        members: folder -> the settings that it would be trained with now.

    Raises:
        ParametersError: with the fields that changed.
    """
    changed: dict[str, tuple[Any, Any]] = {}
    folders = []
    for folder, settings in members.items():
        earlier, record = read_record(folder, FILE_NAME), read_record(folder)
        if earlier is None or record is None or record.get("status") == "failed":
            continue
        found = changed_fields(earlier, settings)
        folders += [folder] if found else []
        changed |= found
    if changed:
        listed = shortened(sentences_on_changes(changed), _SHOWN, "; ")
        raise ParametersError(
            f"{len(folders)} of the {len(members)} runs of this sweep were trained with other settings: "
            f"{listed}. Their results would stand in one table with those of the present settings. Pass another "
            f"--paths.output_dir, or delete {str(folders[0].parent)!r} to train all of them again."
        )
