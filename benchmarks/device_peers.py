"""A device bundle beside onnxruntime-training's own on-device training, and `onward train`, in alternating turns.

`python -m benchmarks.device_peers [MODEL:SIZE ...]`; `make peers` installs onnxruntime-training 1.19.2. Every way has
its own process, the same weights, batches and optimizer (AdamW). Seconds are CPU time of a process, all threads
together, and time on the clock; ratios are medians of those of the rounds, above 1 where the bundle is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.compare import command_of
from benchmarks.compare_contestants import Task
from benchmarks.compare_environment import ORT_PYTHON, hardware, missing_packages
from benchmarks.compare_networks import SIZES
from benchmarks.compare_protocol import Contestant

DEVICE = "onward device"
WAYS = (DEVICE, "onnxruntime-training", "onward")
TASKS = ("mnist:small", "bert:small", "mobilenet:small")
WARM = 3
"""Steps that are not counted."""


@dataclass
class Measured:
    """What a way took: medians of each round in seconds, losses, bytes that its process grew by, bytes of its files."""

    failure: str | None = None
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    grown: int = 0
    files: dict[str, int] = field(default_factory=dict)


def measure(task: Task, ways: Sequence[str], rounds: int, steps: int, ort_python: str | None) -> dict[str, Measured]:
    """All ways of training one network."""
    found = {way: Measured() for way in ways}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "task.json").write_text(json.dumps(asdict(task)))
        subprocess.run(command_of("prepare", folder, None), capture_output=True, check=True)
        runners = {}
        for way in ways:
            command = command_of(way, folder, ort_python)
            if way == DEVICE:
                command = [sys.executable, "-m", "benchmarks.compare_device", way, str(folder)]
            threads = {"OMP_NUM_THREADS": str(task.threads)}
            runners[way] = Contestant(way, command, threads, folder / f"{way}.log")
            _keep(found[way], runners[way], WARM, is_counted=False)
        for _ in range(rounds):
            for way, runner in runners.items():
                _keep(found[way], runner, steps, is_counted=True)
        for way, runner in runners.items():
            memory = runner.ask("memory")
            found[way].grown = 0 if memory is None else memory["resident_bytes"]
            found[way].failure = runner.failure
            runner.end()
        for way, place in ((DEVICE, "bundle"), ("onnxruntime-training", "ort")):
            if way in found:
                found[way].files = {path.name: path.stat().st_size for path in sorted((folder / place).glob("*"))}
    return found


def _keep(found: Measured, runner: Contestant, steps: int, is_counted: bool) -> None:
    answer = runner.ask(f"steps {steps}")
    if answer is None:
        return
    found.losses += answer["losses"]
    if is_counted:
        found.cpu.append(statistics.median(answer["cpu"]))
        found.wall.append(statistics.median(answer["wall"]))


def ratio(own: Sequence[float], other: Sequence[float]) -> str:
    """Of each round, the other's time by the own; above 1: the own is faster."""
    pairs = sorted(theirs / mine for mine, theirs in zip(own, other, strict=True))
    return f"{statistics.median(pairs):.2f} ({pairs[0]:.2f} to {pairs[-1]:.2f})"


def table(task: Task, found: Mapping[str, Measured]) -> str:
    """The result as Markdown."""
    size = SIZES[task.model][task.size]
    shape = f"batch {size.batch}, length {size.length}, {task.threads} thread{'s' if task.threads > 1 else ''}"
    lines = [
        f"### {task.model} {task.size} ({shape})\n",
        "| | step, CPU time | step, wall | bundle's speed by CPU time | by wall | process grew by | files | losses |",
        "|---" * 8 + "|",
    ]
    own = found[DEVICE]
    for way, one in found.items():
        if one.failure is not None:
            lines.append(f"| {way} | left out: {one.failure} |" + " |" * 6)
            continue
        ratios = ["", ""] if one is own else [ratio(own.cpu, one.cpu), ratio(own.wall, one.wall)]
        cells = [
            way,
            f"{statistics.median(one.cpu) * 1e3:.1f} ms",
            f"{statistics.median(one.wall) * 1e3:.1f} ms",
            *ratios,
            f"{one.grown / 1e6:.0f} MB",
            f"{sum(one.files.values()) / 1e6:.1f} MB" if one.files else "",
            f"{one.losses[0]:.5f} to {one.losses[-1]:.5f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=TASKS, metavar="MODEL:SIZE")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5, help="of a turn")
    parser.add_argument("--threads", type=int, default=1, help="more of them wait busily, which is CPU time, too")
    parser.add_argument("--ort-python", default=ORT_PYTHON, help="of an environment with onnxruntime-training 1.19.2")
    options = parser.parse_args()
    missing = missing_packages(options.ort_python, None)
    print(hardware("cpu", options.threads) + "\n")
    for name in ("onnxruntime-training",) if "onnxruntime-training" in missing else ():
        print(f"{name} is missing here: {missing[name]}.\n")
    ways = [way for way in options.ways if way not in missing]
    for text in options.tasks:
        model, _, size = text.partition(":")
        task = Task(model, size, "cpu", False, True, options.threads)
        found = measure(task, ways, options.rounds, options.steps, options.ort_python)
        print(table(task, found), flush=True)


if __name__ == "__main__":
    main()
