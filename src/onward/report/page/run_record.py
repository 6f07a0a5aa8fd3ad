"""What a run left in its folder, read for a report: events, settings, environment, profile."""

from __future__ import annotations

import csv
import io
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from onward.errors import DataError
from onward.parameters.yaml_file import parse_yaml
from onward.untrusted_files import parse_json, read_text

METRICS_NAME = "metrics.jsonl"
RESOLVED_NAME = "resolved.yaml"
"""The run's parameters as they were resolved, next to its trained model."""
RUN_NAME = "run.json"
"""Command line, versions, devices and git state."""

_NOT_PLOTTED = frozenset(
    {"time", "update", "step", "num_train_steps", "round", "epoch", "samples", "seconds", "seconds_left"}
)
"""Numbers of a step that only count."""


@dataclass(frozen=True, kw_only=True)
class ProfiledNode:
    """A row of a profile: a node of the graph, its operator, seconds in all profiled steps, its share of their time."""

    name: str
    operator: str
    calls: int
    forward_seconds: float
    backward_seconds: float
    share: float


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A run as read from its files.

    Attributes:
        name: of the run in the report.
        folder: where it was read from.
        curves: name -> (update, value) of every displayed step; evaluations as `evaluation <metric>`. A value that is
            not finite is None.
        final: metrics of the last evaluation, and what the end of the last round counted.
        messages: (update, text), in order.
        rollbacks: returns to a checkpoint because of a spike, with the fields of `RollBackReport`.
        settings: sections of fields, as resolved.
        environment: what is known of command, versions, devices and git state; nested.
        nodes: of the latest profile, slowest first.
        profile_name: its file; "" without one.
        seconds: between the first and the last event.
        is_finished: a round has ended.
    """

    name: str
    folder: Path
    curves: Mapping[str, Sequence[tuple[int, float | None]]] = field(default_factory=dict)
    final: Mapping[str, float] = field(default_factory=dict)
    messages: Sequence[tuple[int, str]] = ()
    rollbacks: Sequence[Mapping[str, Any]] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    nodes: Sequence[ProfiledNode] = ()
    profile_name: str = ""
    seconds: float = 0.0
    is_finished: bool = False


def read_run(folder: Path, name: str) -> RecordedRun:
    """Reads what a run left in its output folder, or in the folder of its `metrics.jsonl`.

    Raises:
        DataError: there is no folder, or no `metrics.jsonl` in it or below it; or a file is damaged.
        CheckpointError: the settings are in a checkpoint alone, and its manifest is damaged.
    """
    if not folder.is_dir():
        raise DataError(f"{str(folder)!r} is not a folder; pass the output folder of a run.")
    metrics = _newest(folder.rglob(METRICS_NAME))
    if metrics is None:
        raise DataError(
            f"{str(folder)!r} holds no {METRICS_NAME}, nor does a folder in it. Pass the folder of a run that was "
            "trained with tensorboard.log_dir set."
        )
    try:
        told = _told(list(_events(metrics)))
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise DataError(f"{str(metrics)!r} is damaged: {error!r}. Restore the file.") from error
    profile = _newest(folder.rglob("*.nodes.csv"))
    return RecordedRun(
        **told,
        name=name,
        folder=folder,
        settings=_settings(folder),
        environment=_environment(folder),
        nodes=() if profile is None else _nodes(profile),
        profile_name="" if profile is None else profile.name.removesuffix(".nodes.csv"),
    )


def _told(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fields of a record that events tell. Events that hold something else raise whatever they do."""
    times = [float(event["time"]) for event in events if "time" in event]
    return {
        "curves": _curves(events),
        "final": _final(events),
        "messages": [(int(one.get("update", 0)), str(one["text"])) for one in events if one.get("kind") == "message"],
        "rollbacks": [event for event in events if event.get("kind") == "roll_back"],
        "seconds": max(times) - min(times) if times else 0.0,
        "is_finished": any(event.get("kind") == "end" for event in events),
    }


def _newest(paths: Iterable[Path]) -> Path | None:
    return max(paths, key=lambda path: (path.stat().st_mtime, str(path)), default=None)


def _events(path: Path) -> Iterable[dict[str, Any]]:
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{str(path)!r} cannot be read: {error}. Restore the file.") from error
    for number, line in enumerate(lines, 1):
        try:
            event = parse_json(line)
        except ValueError as error:
            if number == len(lines):
                return  # a run that is writing it, or was killed while it did
            raise DataError(f"{str(path)!r}, line {number} is not JSON: {error}. Restore the file.") from error
        if isinstance(event, dict):
            yield event


def _number(value: Any) -> float | None:
    """A finite number; None for what is none, such as the text "NaN"."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    number = float(value) if abs(value) <= sys.float_info.max else math.inf
    return number if math.isfinite(number) else None


def _curves(events: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float | None]]]:
    curves: dict[str, list[tuple[int, float | None]]] = {}
    for event in events:
        update = int(event.get("update", 0))
        if event.get("kind") == "step":
            for name, value in event.items():
                is_number = _number(value) is not None or value in ("NaN", "Infinity", "-Infinity")
                if name not in _NOT_PLOTTED and is_number:
                    curves.setdefault(name, []).append((update, _number(value)))
        elif event.get("kind") == "evaluation":
            for name, value in event.get("metrics", {}).items():
                curves.setdefault(f"evaluation {name}", []).append((update, _number(value)))
        elif event.get("kind") == "roll_back":
            last = _number(event.get("returned_to")) or 0.0
            curves = {name: [point for point in points if point[0] <= last] for name, points in curves.items()}
    return curves


def _final(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    final: dict[str, float] = {}
    for event in events:
        if event.get("kind") == "evaluation":
            found = {f"evaluation {name}": _number(value) for name, value in event.get("metrics", {}).items()}
            final |= {name: value for name, value in found.items() if value is not None}
        elif event.get("kind") == "end":
            found = _of_round({name: _number(value) for name, value in event.items() if name not in _COUNTERS})
            final |= {name.replace("_", " "): value for name, value in found.items() if value is not None}
    return final


def _of_round(end: Mapping[str, float | None]) -> dict[str, float | None]:
    """The numbers of a round's end, with what it counted before it was resumed; durations say since when they count."""
    found, step = dict(end), end.get("steps_before")
    for name in ("steps", "updates", "samples"):
        before, since = found.pop(f"{name}_before", None), found.get(name)
        found[name] = since if since is None else since + (before or 0)
    first = found.pop("first_loss_of_round", None)
    if not step:
        return found
    seconds = {name: found.pop(name) for name in ("seconds", "train_seconds") if name in found}
    of_round = {**found, "first_loss": first} if first is not None else found
    return {**of_round, **{f"since_step_{step:.0f}_{name}": value for name, value in seconds.items()}}


_COUNTERS = frozenset({"kind", "time", "update", "round", "batch_size", "gradient_accumulation_steps"})
"""Of the end of a round: what says nothing about how good or fast it was."""


def _settings(folder: Path) -> dict[str, Any]:
    """From the resolved parameters next to the model, else from the newest checkpoint's manifest."""
    resolved = _newest(folder.rglob(RESOLVED_NAME))
    if resolved is not None:
        try:
            return dict(parse_yaml(read_text(resolved)) or {})
        except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
            raise DataError(f"{str(resolved)!r} is damaged: {error}. Restore the file, or delete it.") from error
    manifest = _newest(folder.rglob("checkpoint-*/manifest.json"))
    if manifest is None:
        return {}
    from onward.checkpoint.reading import read_record  # it imports torch, which runs with resolved parameters spare

    return dict(read_record(manifest.parent).get("parameters", {}))


def flatten(sections: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as `a.b` -> value; what is empty or None is left out."""
    flat: dict[str, Any] = {}
    for name, value in sections.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        elif value is not None and value != []:
            flat[f"{prefix}{name}"] = value
    return flat


def _environment(folder: Path) -> dict[str, Any]:
    path = _newest(folder.rglob(RUN_NAME))
    if path is None:
        return {}
    try:
        return dict(parse_json(read_text(path)))
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{str(path)!r} is damaged: {error}. Restore the file, or delete it.") from error


def _nodes(path: Path) -> list[ProfiledNode]:
    try:
        with io.StringIO(read_text(path), newline="") as file:
            rows = [
                ProfiledNode(
                    name=row["name"],
                    operator=row["operator"],
                    calls=int(row["calls"]),
                    forward_seconds=float(row["forward_seconds"]),
                    backward_seconds=float(row["backward_seconds"]),
                    share=float(row["share"]),
                )
                for row in csv.DictReader(file)
            ]
    except (OSError, csv.Error, KeyError, ValueError, TypeError) as error:
        raise DataError(f"{str(path)!r} is damaged: {error!r}. Profile the run again, or delete the file.") from error
    return sorted(rows, key=lambda row: -row.share)
