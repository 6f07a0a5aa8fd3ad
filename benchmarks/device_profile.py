"""Where the time of a step goes, by operator, of a device bundle and of onnxruntime-training's own training session.

`python -m benchmarks.device_profile [MODEL:SIZE ...]`: both run in processes of their own with ONNX Runtime's profiler
on. An operator's time is the sum over its nodes of their median over the steps, so that a step in which the machine did
something else counts as little as the first, in which the runtime plans its memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare import command_of
from benchmarks.compare_contestants import Task
from benchmarks.compare_environment import ORT_PYTHON, hardware
from benchmarks.compare_protocol import Contestant
from benchmarks.device_peers import DEVICE, TASKS

ORT = "onnxruntime-training"
ROWS = 12
CONTAINERS = {"If", "Loop", "Scan"}
"""Their time is that of the nodes inside, which are listed themselves."""


@dataclass(frozen=True)
class OperatorTime:
    """Milliseconds of a step that an operator takes, and how many of its nodes run."""

    milliseconds: float
    nodes: int


def operator_times(sessions: Iterable[list[dict[str, Any]]]) -> dict[str, OperatorTime]:
    """The time of each operator in a step.

    Args:
        sessions: the events of the profile of each session that a step runs once.
    """
    times: dict[str, float] = defaultdict(float)
    nodes: dict[str, int] = defaultdict(int)
    for events in sessions:
        runs: dict[tuple[str, str], list[float]] = defaultdict(list)
        for event in events:
            if event["name"].endswith("_kernel_time") and event["args"]["op_name"] not in CONTAINERS:
                runs[event["args"]["op_name"], event["name"]].append(event["dur"] / 1e3)
        for (operator, _), durations in runs.items():
            times[operator] += statistics.median(durations)
            nodes[operator] += 1
    return {name: OperatorTime(times[name], nodes[name]) for name in times}


def profile(task: Task, steps: int, ort_python: str) -> dict[str, dict[str, OperatorTime]]:
    """Both ways of training one network -> their operators' times.

    Raises:
        RuntimeError: one of them failed.
    """
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "task.json").write_text(json.dumps(asdict(task)))
        subprocess.run(command_of("prepare", folder, None), capture_output=True, check=True)
        (folder / "profiles").mkdir()
        device = [sys.executable, "-m", "benchmarks.compare_device", DEVICE, str(folder)]
        for way, command in ((DEVICE, device), (ORT, command_of(ORT, folder, ort_python))):
            runner = Contestant(way, command, {"OMP_NUM_THREADS": str(task.threads)}, folder / f"{way}.log")
            runner.ask(f"steps {steps}")
            runner.end()  # when a profile is written
            if runner.failure is not None:
                raise RuntimeError(f"{way}: {runner.failure}")
            files = (folder / "profiles").glob(f"{way.split()[-1]}*.json")
            found[way] = operator_times(json.loads(path.read_text()) for path in files)
    return found


def table(task: Task, found: Mapping[str, Mapping[str, OperatorTime]]) -> str:
    """The operators that take most of either, as Markdown; the others are in the last row but one."""
    own, other = found[DEVICE], found[ORT]
    nothing = OperatorTime(0.0, 0)

    def largest(name: str) -> float:
        return -max(own.get(name, nothing).milliseconds, other.get(name, nothing).milliseconds)

    ranked = sorted({*own, *other}, key=largest)
    shown = {name: [name] for name in ranked[:ROWS]} | {"others": ranked[ROWS:], "all": ranked}
    lines = [
        f"### {task.model} {task.size}\n",
        f"| operator | {DEVICE}, ms | nodes | {ORT}, ms | nodes |",
        "|---|---|---|---|---|",
    ]
    for label, names in shown.items():
        cells = []
        for times in (own, other):
            here = [times.get(name, nothing) for name in names]
            count = sum(one.nodes for one in here)
            cells += [f"{sum(one.milliseconds for one in here):.2f}", str(count)] if count else ["", ""]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=TASKS, metavar="MODEL:SIZE")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--ort-python", default=ORT_PYTHON, help="of an environment with onnxruntime-training 1.19.2")
    options = parser.parse_args()
    if options.ort_python is None:
        parser.error("there is no environment with onnxruntime-training: run `make peers`")
    print(hardware("cpu", 1) + "\n")
    for text in options.tasks:
        model, _, size = text.partition(":")
        task = Task(model, size, "cpu", False, True, 1)
        print(table(task, profile(task, options.steps, options.ort_python)), flush=True)


if __name__ == "__main__":
    main()
