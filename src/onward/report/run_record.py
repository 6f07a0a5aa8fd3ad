"""What a run was: `run.json` (command, versions, machine, git state, results) and `resolved.yaml` in its folder."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml

from onward import __version__
from onward.engine.reports import CheckpointReport, EvaluationReport, RollBackReport, RunSummary, StepReport
from onward.engine.steering import INTERRUPTED
from onward.environment import Environment
from onward.errors import StorageError
from onward.parameters import Parameters
from onward.parameters.yaml_file import to_plain
from onward.report.metrics_file import as_json
from onward.report.run_folder import RECORD_NAME, RESOLVED_NAME, read_record
from onward.retries import persistently

PACKAGES = (
    "torch",
    "onnx",
    "onnx-ir",
    "onnxscript",
    "onnxruntime",
    "numpy",
    "torchmetrics",
    "tensorboard",
    "safetensors",
)
"""Packages whose versions a result may depend on."""

LONGEST_GIT_SECONDS = 5.0


def describe_run(
    environment: Environment, world_size: int, run_file: Path | None, arguments: Sequence[str]
) -> dict[str, Any]:
    """Command line, versions, machine and git state, ready for JSON."""
    device = environment.device
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if device.type == "cuda" else []
    return {
        "command": list(arguments),
        "folder": str(Path.cwd()),
        "run_file": None if run_file is None else str(run_file),
        "onward": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "device": device.type,
        "gpus": names,
        "cuda": torch.version.cuda,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "deterministic": environment.deterministic,
        "processes": world_size,
        "git": None if run_file is None else git_state(run_file.resolve().parent),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the repository that a folder is in, and whether files of it are changed; None: it is in none."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "branch": _git(folder, "rev-parse", "--abbrev-ref", "HEAD"), "is_dirty": bool(status)}


def resolved_yaml(parameters: Parameters) -> str:
    """All fields of a run as they are used, defaults and conversions included."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # the one in C, which writes the same, is not in every build
    return str(yaml.dump(parameters.to_mapping(), Dumper=dumper, sort_keys=False, allow_unicode=True))


def hyperparameters(parameters: Parameters) -> dict[str, int | float | str | bool]:
    """The fields that differ from their defaults and the required ones, as `section.field` -> a number or text."""
    found: dict[str, int | float | str | bool] = {}
    for section in dataclasses.fields(parameters):
        held = getattr(parameters, section.name)
        if section.name == "paths" or not dataclasses.is_dataclass(held):
            continue
        for one in dataclasses.fields(held):
            value = getattr(held, one.name)
            default = one.default_factory() if callable(one.default_factory) else one.default
            if value is not None and value != default and "Path" not in str(one.type):
                plain = to_plain(value)
                is_simple = isinstance(plain, int | float | str)
                found[f"{section.name}.{one.name}"] = plain if is_simple else json.dumps(plain)
    return found


class RunRecord:
    """Keeps `run.json` and `resolved.yaml` of a run up to date; a watcher of rank 0.

    `run.json` holds what `describe_run` found, `status` (running, done, interrupted or failed), the last metrics,
    losses, returns to a checkpoint because of a spike, the checkpoint, and which weights were written where. A resumed
    run keeps when it was started first, where its folder holds that; `resumed` and `resumed_update` say when it
    resumed, and last from which update.

    Args:
        folder: of the run; made where it is missing.
        resolved: what `resolved_yaml` made of the parameters.
        about: from `describe_run`.
        resumed_update: the update of the checkpoint that the run resumes from; None: it begins.

    Raises:
        StorageError: the files cannot be written.
    """

    def __init__(self, folder: Path, resolved: str, about: Mapping[str, Any], resumed_update: int | None) -> None:
        self.path = folder / RECORD_NAME
        is_resumed, now = resumed_update is not None, _now()
        earlier = (read_record(folder) if is_resumed else None) or {}
        self.record: dict[str, Any] = {
            "status": "running",
            "started": earlier.get("started", now),
            "resumed": [*earlier.get("resumed", ()), now] if is_resumed else [],
            "resumed_update": resumed_update,
            "ended": None,
            **about,
            "metrics": earlier.get("metrics", {}),
            "rounds": earlier.get("rounds", []),
            "rollbacks": earlier.get("rollbacks", []),
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / RESOLVED_NAME).write_text(resolved, encoding="utf-8")
        except OSError as error:
            raise _storage_error(folder, error) from error
        self._write()

    def on_step(self, report: StepReport) -> None:
        """Steps are for `metrics.jsonl`."""

    def on_evaluation(self, report: EvaluationReport) -> None:
        """Keeps the metrics."""
        self.record["metrics"] = {**report.metrics, "step": report.step, "update": report.update}
        self._write()

    def on_checkpoint(self, report: CheckpointReport) -> None:
        """Checkpoints are found in their folder."""

    def on_roll_back(self, report: RollBackReport) -> None:
        """Keeps what was left out; a resumed run that meets the same spike again reports it once."""
        earlier = [one for one in self.record["rollbacks"] if one.get("update") != report.update]
        self.record["rollbacks"] = [*earlier, dataclasses.asdict(report)]
        self._write()

    def on_message(self, text: str) -> None:
        """Messages are for `metrics.jsonl`."""

    def on_end(self, summary: RunSummary) -> None:
        """Keeps what the round amounted to."""
        kept = ("round", "steps", "updates", "samples", "first_loss", "last_loss", "seconds", "samples_per_second")
        before = ("steps_before", "updates_before", "samples_before", "first_loss_of_round")
        ended = {name: getattr(summary, name) for name in (*kept, *before, "checkpoint", "stopped")}
        others = [one for one in self.record["rounds"] if one.get("round") != summary.round]
        self.record["rounds"] = [*others, ended]
        self._write()
        if summary.stopped is not None and summary.stopped.startswith(INTERRUPTED):
            self.finish("interrupted")

    def on_trained_model(self, what: str, paths: Sequence[str]) -> None:
        """Keeps what was written; metrics are of the last evaluation, which need not be that of these weights."""
        self.record["trained_model"] = {"weights": what, "files": list(paths)}
        self._write()

    def finish(self, status: str) -> None:
        """The run is over: done, interrupted or failed; what came first counts."""
        if self.record["status"] != "running":
            return
        self.record |= {"status": status, "ended": _now()}
        self._write()

    def close(self) -> None:
        """A run that is closed without having finished has failed."""
        if self.record["status"] == "running":
            self.finish("failed")

    def _write(self) -> None:
        partial = self.path.with_name(f".{self.path.name}.partial")
        text = json.dumps(as_json(self.record), indent=1, ensure_ascii=False) + "\n"

        def write() -> None:
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, self.path)

        try:
            persistently(write, f"writing {self.path}")
        except OSError as error:
            raise _storage_error(self.path.parent, error) from error


def command_line() -> list[str]:
    """The command as it was given."""
    return ["onward", *sys.argv[1:]] if Path(sys.argv[0]).name in ("onward", "__main__.py") else list(sys.argv)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=LONGEST_GIT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _storage_error(folder: Path, error: OSError) -> StorageError:
    return StorageError(
        f"the record of the run cannot be written to {str(folder)!r}: {error.strerror or error}. Make room, correct "
        "its permissions, or set another paths.output_dir."
    )
