"""The settings that each run of a sweep was started with, kept in its folder, so that later ones can be compared."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from onward.errors import ParametersError, StorageError
from onward.exclusive.temporary import replacing
from onward.parameters import Parameters
from onward.report.run_folder import read_record
from onward.spelling import shortened

FILE_NAME = "sweep.json"
_WITHOUT_EFFECT_ON_RESULTS = (
    "paths.output_dir",
    "checkpoint.",
    "tensorboard.",
    "wandb.",
    "mlflow.",
    "aim.",
    "profiler.",
    "training.display_loss_steps",
)
_SHOWN = 5


def settings_of(parameters: Parameters, base: Path) -> dict[str, Any]:
    """Fields that may change a result -> values; paths relative to the folder of RUN.yaml."""
    fields = dict(_flat(parameters.to_mapping(), "", f"{base.resolve()}/"))
    return {name: value for name, value in fields.items() if not name.startswith(_WITHOUT_EFFECT_ON_RESULTS)}


def _flat(value: Any, name: str, base: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, one in value.items():
            yield from _flat(one, f"{name}.{key}" if name else str(key), base)
    elif isinstance(value, list | tuple) and value:
        for number, one in enumerate(value):
            yield from _flat(one, f"{name}[{number}]", base)
    else:
        yield name, value.removeprefix(base) if isinstance(value, str) else value


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
    """Refuses a sweep some of whose runs were begun with other settings; those that failed begin anew.

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
        settings = json.loads(json.dumps(settings))
        found = {
            name: (earlier.get(name), settings.get(name))
            for name in (*settings, *(name for name in earlier if name not in settings))
            if earlier.get(name) != settings.get(name)
        }
        folders += [folder] if found else []
        changed |= found
    if changed:
        listed = shortened(
            (f"{name} was {was!r}, is now {now!r}" for name, (was, now) in changed.items()), _SHOWN, "; "
        )
        raise ParametersError(
            f"{len(folders)} of the {len(members)} runs of this sweep were trained with other settings: "
            f"{listed}. Their results would stand in one table with those of the present settings. Pass another "
            f"--paths.output_dir, or delete {str(folders[0].parent)!r} to train all of them again."
        )
