"""What each speed-up gains: `python -m benchmarks.speedups [MODEL:SIZE ...]`, on a CPU.

A network of `benchmarks.compare` trains with a speed-up and without it, in turns, in one process: with, without,
without, with. Counted is what the process computes, all threads together, so that other work on the machine disturbs
little. The allocator can be asked only once in a process, so there each side is its own process.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.compare_contestants import Step, Task, make_onward, onward_fields, peak_of_tensors
from benchmarks.compare_environment import hardware
from benchmarks.compare_networks import IMAGES, SIZES
from benchmarks.compare_protocol import Contestant
from onward.engine.building.preparation import read_training_graph
from onward.graph.fusion.passes import FUSIONS
from onward.graph.shared_inputs import layers_that_read_the_same
from onward.lowering.kernels import matmuls as products
from onward.lowering.kernels import max_pooling
from onward.lowering.ops import fused_cross_entropy
from onward.parameters import Parameters

Fields = Mapping[str, Mapping[str, Any]]
SMALL = tuple(f"{model}:small" for model in SIZES)
LANGUAGE = frozenset(SIZES) - IMAGES
ALLOCATOR = "freed memory is kept"
ASKED = {"MALLOC_PERTURB_": "0"}
"""Changes nothing (it is the C library's default), but says that the user asks for something."""
WARM = 3
"""Steps of each side that are not counted."""


@dataclass(frozen=True)
class SpeedUp:
    """Something that makes steps faster or smaller.

    Attributes:
        off: fields of a RUN.yaml that turn it off.
        without: where there is no field, or not only one, what turns it off while a step runs.
        networks: those that it can matter to.
    """

    off: Fields = field(default_factory=dict)
    without: Callable[[], AbstractContextManager[Any]] = nullcontext
    networks: Collection[str] = frozenset(SIZES)


def _all_rows(rows: torch.Tensor, labels: torch.Tensor, _: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    return rows, labels


SPEED_UPS: Mapping[str, SpeedUp] = {
    "all fusions": SpeedUp({"speed": {"fuse": False}}),
    **{f"fusion {name}": SpeedUp({"speed": {"fusions_off": [name]}}) for name in FUSIONS},
    "layers that read the same are joined": SpeedUp({"speed": {"join_layers": False}}, networks=LANGUAGE),
    "cheap activations are recomputed": SpeedUp({"recompute": {"cheap_activations": False}}),
    "places of maxima in a byte": SpeedUp(
        without=lambda: patch.object(max_pooling, "LEAST_BYTES", 2**60), networks=IMAGES
    ),
    "products by oneDNN": SpeedUp(
        without=lambda: patch.object(products, "prefers_onednn", lambda: False), networks=LANGUAGE
    ),
    "no logits for ignored labels": SpeedUp(
        without=lambda: patch.object(fused_cross_entropy, "_rows_that_count", _all_rows), networks={"bert"}
    ),
    "channels last": SpeedUp({"speed": {"channels_last": False}}, networks=IMAGES),
    ALLOCATOR: SpeedUp(),
    "fp32 rather than bf16": SpeedUp({"mixed_precision": {"use_mixed_precision": True, "use_bfloat16": True}}),
}


@dataclass
class Measured:
    """What a speed-up gains in a network.

    Attributes:
        name: of the speed-up.
        with_it, without_it: seconds of the steps of each side, two a round.
        saved_bytes: how much less tensors take at once in a step with it; None: not measured.
    """

    name: str
    with_it: list[float] = field(default_factory=list)
    without_it: list[float] = field(default_factory=list)
    saved_bytes: int | None = None

    @property
    def gains(self) -> list[float]:
        """How many times as fast, in each round."""
        sums = [[sum(pair) for pair in zip(s[::2], s[1::2], strict=True)] for s in (self.with_it, self.without_it)]
        return [slow / fast for fast, slow in zip(*sums, strict=True)]


def applies(speed_up: SpeedUp, task: Task, folder: Path) -> bool:
    """Whether a speed-up can change anything about a network."""
    if task.model not in speed_up.networks:
        return False
    changed = speed_up.off.get("speed", {})
    if "fusions_off" not in changed and "join_layers" not in changed:
        return True
    usual, other = (
        read_training_graph(Parameters.from_mapping({**onward_fields(task, folder), **changes}))
        for changes in ({}, speed_up.off)
    )
    if "join_layers" in changed:
        return bool(layers_that_read_the_same(usual.model.graph, usual.weights))
    return usual.fusions != other.fusions


def measure(task: Task, folder: Path, names: Sequence[str], rounds: int) -> list[Measured]:
    """Every speed-up that applies to a network that was prepared in a folder."""
    base = {"compile": False}
    usual = make_onward(task, folder, {"speed": base})
    found = []
    for name in names:
        speed_up = SPEED_UPS[name]
        if not applies(speed_up, task, folder):
            continue
        if name == ALLOCATOR:
            found.append(_in_two_processes(folder, rounds))
            continue
        other = usual
        if speed_up.off:
            other = make_onward(task, folder, {**speed_up.off, "speed": {**base, **speed_up.off.get("speed", {})}})
        found.append(_in_turns(task, name, usual, other, speed_up.without, rounds))
    return found


def _in_turns(
    task: Task, name: str, usual: Step, other: Step, without: Callable[[], AbstractContextManager[Any]], rounds: int
) -> Measured:
    found = Measured(name)

    def step(number: int, is_on: bool) -> float:
        with nullcontext() if is_on else without():
            started = time.process_time()
            (usual if is_on else other)(number)
            return time.process_time() - started

    for number in range(WARM):
        step(number, True)
        step(number, False)
    for number in range(rounds):
        for is_on in (True, False, False, True):
            (found.with_it if is_on else found.without_it).append(step(number, is_on))
    peaks = [peak_of_tensors(task.device, lambda is_on=is_on: step(0, is_on)) for is_on in (True, False)]  # type: ignore[misc]
    found.saved_bytes = peaks[1] - peaks[0]
    return found


def _in_two_processes(folder: Path, rounds: int) -> Measured:
    found = Measured(ALLOCATOR)
    command = [sys.executable, "-m", "benchmarks.compare_contestants", "onward uncompiled", str(folder)]
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    sides = {
        is_on: Contestant(str(is_on), command, {**threads, **({} if is_on else ASKED)}, folder / f"{is_on}.log")
        for is_on in (True, False)
    }
    for side in sides.values():
        side.ask(f"steps {WARM}")
    for _ in range(rounds):
        for is_on in (True, False, False, True):
            answer = sides[is_on].ask("steps 1")
            if answer is None:
                raise RuntimeError(f"a step failed: {sides[is_on].failure}")
            (found.with_it if is_on else found.without_it).extend(answer["cpu"])
    for side in sides.values():
        side.end()
    return found


def table(task: Task, results: Sequence[Measured]) -> str:
    """The results as Markdown."""
    lines = [
        f"### {task.model} {task.size}\n",
        "| | step with it | without it | times as fast (quartiles) | memory of tensors that it saves |",
        "|---|---|---|---|---|",
    ]
    for found in results:
        low, middle, high = _quartiles(found.gains)
        saved = "" if found.saved_bytes is None else f"{found.saved_bytes / 1e6:.1f} MB"
        steps = (f"{1e3 * statistics.median(side):.1f} ms" for side in (found.with_it, found.without_it))
        lines.append(f"| {found.name} | {' | '.join(steps)} | {middle:.3f} ({low:.3f} to {high:.3f}) | {saved} |")
    return "\n".join(lines) + "\n"


def _quartiles(numbers: Sequence[float]) -> tuple[float, float, float]:
    if len(numbers) == 1:
        return (numbers[0],) * 3
    low, middle, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return low, middle, high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="MODEL:SIZE", default=SMALL)
    parser.add_argument("--only", nargs="+", choices=SPEED_UPS, default=tuple(SPEED_UPS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    for text in options.tasks:
        model, _, size = text.partition(":")
        if size not in SIZES.get(model, {}):
            parser.error(f"{text!r} is none of: {', '.join(f'{m}:{s}' for m, sizes in SIZES.items() for s in sizes)}")
    torch.set_num_threads(options.threads)
    date = datetime.date.today().isoformat()
    load = f"{os.getloadavg()[0]:.0f} other processes wanted the {os.cpu_count()} cores when it began"
    command = f"`python -m benchmarks.speedups {' '.join(options.tasks)} --rounds {options.rounds}`"
    heading = f"# What each speed-up gains, {date}\n\n{hardware('cpu', options.threads)}; {command}; {load}.\n"
    print(heading, flush=True)
    record: dict[str, Any] = {"date": date, "hardware": hardware("cpu", options.threads), "results": {}}
    tables = []
    stem = f"{date}-cpu-speedups-{'-'.join(dict.fromkeys(text.partition(':')[0] for text in options.tasks))}"
    options.out.mkdir(parents=True, exist_ok=True)
    for text in options.tasks:
        model, _, size = text.partition(":")
        task = Task(model, size, "cpu", False, True, options.threads)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "task.json").write_text(json.dumps(asdict(task)))
            prepare = [sys.executable, "-m", "benchmarks.compare_contestants", "prepare", name]
            subprocess.run(prepare, check=True, capture_output=True)
            results = measure(task, folder, options.only, options.rounds)
        tables.append(table(task, results))
        print(tables[-1], flush=True)
        record["results"][text] = [asdict(found) for found in results]
        (options.out / f"{stem}.json").write_text(json.dumps(record, indent=1) + "\n")
        (options.out / f"{stem}.md").write_text(heading + "\n" + "\n".join(tables))


if __name__ == "__main__":
    main()
