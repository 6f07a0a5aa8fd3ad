"""The fields of a run by which a bundle was made: recorded in states of devices, and compared on the way back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onward.errors import CheckpointError
from onward.parameters import Parameters
from onward.parameters.changes import changed_fields
from onward.spelling import shortened
from onward.untrusted_files import RefusedFile, parse_json

RUN_FIELDS = "run_fields"
"""Of the manifest, and of the metadata of a state: `write_fields` of the bundle's run."""

_SECTIONS = ("loss", "head", "adapter", "optimizer", "learning_rate", "distillation", "mixed_precision")
_TRAINING = (
    "gradient_accumulation_steps",
    "accumulate_as",
    "seed",
    "weights_to_train",
    "weights_not_to_train",
    "train_last",
    "freeze_batch_norm",
    "tied_weights",
    "untied_weights",
    "immutable_weights",
    "revive_dropout",
)
_ONLY_AT_BOTH_ENDS = ("adapter.start_path", "adapter.outputs", "adapter.module_prefix")
"""Fields of these sections that decide nothing between the first step and the last."""

_SHOWN = 8


def fields_of(parameters: Parameters) -> dict[str, Any]:
    """`section.field` -> plain value of the fields that decide what a device computes; a path is `a file`, anywhere."""
    asked = parameters.to_mapping()
    names = [(section, name) for section in _SECTIONS for name in asked[section]]
    found = {}
    for section, name in (*names, *(("training", name) for name in _TRAINING)):
        is_path = isinstance(getattr(getattr(parameters, section), name, None), Path)
        found[f"{section}.{name}"] = "a file" if is_path else asked[section][name]
    return {name: value for name, value in found.items() if name not in _ONLY_AT_BOTH_ENDS}


def write_fields(parameters: Parameters) -> str:
    """`fields_of` as the text that clients copy from the manifest into their states."""
    return json.dumps(fields_of(parameters), separators=(",", ":"))


def check_fields(recorded: str, parameters: Parameters, state: Path) -> None:
    """Compares the fields that a state records with those of a run.

    Raises:
        CheckpointError: they differ, with every name and both values, or are damaged.
    """
    try:
        fields = parse_json(recorded.encode())
    except (RefusedFile, ValueError) as error:
        raise CheckpointError(f"the {RUN_FIELDS} of {state} are damaged: {error}. Save the state again.") from error
    if not isinstance(fields, Mapping):
        raise CheckpointError(f"the {RUN_FIELDS} of {state} are no fields of a run. Save the state again.")
    changed = changed_fields(fields, fields_of(parameters))
    if changed:
        told = [f"{name} was {was!r} for the bundle, and is {now!r} here" for name, (was, now) in changed.items()]
        raise CheckpointError(
            f"{state} was trained with other fields than this run's: {shortened(told, _SHOWN, '; ')}. Pass the "
            "RUN.yaml and the --section.field values that the bundle was written with; change them in "
            "`onward train` afterwards."
        )
