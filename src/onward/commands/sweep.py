"""`onward train --sweep`: a run with other values of some fields, one after the other, and a table at the end."""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onward.commands.sweep_settings import refuse_changed, settings_of, write_settings
from onward.errors import Interrupted, OnwardError, ParametersError
from onward.exclusive.lock import writing_to
from onward.parameters import Parameters
from onward.report.formatting import format_duration, format_value
from onward.report.phases import Phases
from onward.report.run_folder import read_record
from onward.tables import aligned

FOLDER = "sweep"
"""Of all runs, in `paths.output_dir`."""

INTERRUPTED_CODES = (3, -2, -15)
"""Exit codes of a run that was interrupted: saved, or ended by SIGINT or SIGTERM."""


@dataclass(frozen=True)
class Member:
    """One run of a sweep.

    Attributes:
        values: field -> its value, as text.
        folder: where the run writes.
        settings: what else may change its result, for comparison with an earlier call.
    """

    values: Mapping[str, str]
    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The values, as they are shown."""
        return ", ".join(f"{field}={value}" for field, value in self.values.items())


def sweep(options: argparse.Namespace, overrides: Mapping[str, str], phases: Phases) -> None:
    """Trains every member that is not done yet, each in its own process, and prints a table.

    A member that fails does not end the others.

    Raises:
        ParametersError: a field is unknown, a value is impossible, there is no output_dir, or runs that are done were
            trained with other settings.
        Interrupted: a member was interrupted; the same command resumes with it.
        OnwardError: members failed; the others are done.
    """
    members = find_members(options.file, options.sweep, overrides)
    phases.end()
    with writing_to([] if options.dry_run else [members[0].folder.parent]):
        _train_all(members, options, overrides)


def _train_all(members: Sequence[Member], options: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    if not options.dry_run:
        refuse_changed({member.folder: member.settings for member in members})
    is_shown = not options.quiet and not options.json
    failed = 0
    for number, member in enumerate(members, 1):
        is_done = (_record(member) or {}).get("status") == "done"
        if is_shown:
            print(
                f"sweep  {number} of {len(members)}: {member.name}" + (", already done" if is_done else ""), flush=True
            )
        if is_done and not options.dry_run:
            continue
        if not options.dry_run:
            write_settings(member.folder, member.settings)
        code = _train(options, overrides, member)
        if code in INTERRUPTED_CODES:
            raise Interrupted(
                f"the sweep was interrupted in run {number} of {len(members)} ({member.name}). The same "
                "command resumes."
            )
        failed += code != 0
    if not options.dry_run:
        # Standard output has nothing but JSON then.
        print("\n".join(table(members)), file=sys.stderr if options.json else sys.stdout, flush=True)
    if failed:
        raise OnwardError(f"{failed} of {len(members)} runs failed, each with its message above; the others are done.")


def find_members(file: str | Path, asked: Sequence[str], overrides: Mapping[str, str]) -> list[Member]:
    """All combinations of the values asked for, checked before the first is trained.

    Raises:
        ParametersError: of every kind that `Parameters.load` raises, or values are missing.
    """
    axes: dict[str, list[str]] = {}
    for text in asked:
        name, equals, values = text.partition("=")
        name = name.removeprefix("--")
        if not equals or "." not in name or not values:
            raise ParametersError(f"--sweep {text!r} is not understood; expected section.field=A,B,C.")
        if name in axes or name in overrides:
            raise ParametersError(f"--sweep {name} is set twice; list all its values in one --sweep.")
        axes[name] = split_values(values)
    base = Parameters.load(file, {**overrides, **{name: values[0] for name, values in axes.items()}})
    output = base.paths.output_dir
    if output is None:
        raise ParametersError("--sweep needs paths.output_dir, in which each run writes to its own folder. Set it.")
    members = []
    for combination in itertools.product(*axes.values()):
        chosen = dict(zip(axes, combination, strict=True))
        folder = output / FOLDER / re.sub(r"[^\w.=+-]+", "_", "+".join(f"{n}={v}" for n, v in chosen.items()))
        member = Member(chosen, folder)
        parameters = Parameters.load(file, _fields(member, overrides))
        members.append(replace(member, settings=settings_of(parameters, Path(file).parent)))
    return members


def split_values(text: str) -> list[str]:
    """Values between commas; commas in brackets or quotes belong to a value."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        depth += (character in "[{") - (character in "]}") if not quote else 0
        if character == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def table(members: Sequence[Member]) -> list[str]:
    """The result of every member, a line each."""
    records = [_record(member) or {} for member in members]
    metrics = list(dict.fromkeys(name for one in records for name in one.get("metrics", {}) if name not in _COUNTS))
    fields = list(members[0].values)
    rows = [[*fields, "train loss", *(f"test {name}" for name in metrics), "time", ""]]
    for member, record in zip(members, records, strict=True):
        last = (record.get("rounds") or [{}])[-1]
        found = [_number(last.get("last_loss")), *(_number(record.get("metrics", {}).get(name)) for name in metrics)]
        seconds = sum(one.get("seconds") or 0 for one in record.get("rounds", ()))
        rows.append([*member.values.values(), *found, format_duration(seconds), str(record.get("status", "failed"))])
    return ["", *aligned(rows)]


_COUNTS = ("step", "update")
"""What the metrics of a record hold in addition to metrics."""


def _number(value: Any) -> str:
    return "" if value is None else format_value(float(value))


def _record(member: Member) -> dict[str, Any] | None:
    return read_record(member.folder)


def _fields(member: Member, overrides: Mapping[str, str]) -> dict[str, str]:
    """Fields of a member's run: everything that it writes goes to its own folder."""
    folder = member.folder
    places = {
        "paths.output_dir": str(folder),
        "checkpoint.checkpoints_dir": str(folder / "checkpoints"),
        "tensorboard.log_dir": str(folder),
    }
    return {**overrides, **places, **member.values}


def _train(options: argparse.Namespace, overrides: Mapping[str, str], member: Member) -> int:
    """Trains one member; the exit code."""
    asked = {"--quiet": options.quiet, "--json": options.json, "--dry-run": options.dry_run}
    arguments = [name for name, is_asked in asked.items() if is_asked]
    arguments += [] if options.log_level is None else ["--log-level", options.log_level]
    arguments += [f"--{name}={value}" for name, value in _fields(member, overrides).items()]
    command = [sys.executable, "-m", "onward", "train", str(options.file), *arguments]
    with subprocess.Popen(command) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue  # the run got the signal, too; it saves and ends
