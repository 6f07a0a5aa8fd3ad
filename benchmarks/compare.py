"""onward next to what a user would pick instead: `make bench`, or `python -m benchmarks.compare [MODEL:SIZE ...]`.

Every way of training has its own process and the same weights and batches; they take turns, a few steps each, so
that all of them see the same machine. Ratios are of onward to each other way, medians over the rounds.

On a CPU the time of a step is what its process computed, all threads together: what else runs on the machine does not
count. On a GPU it is the time on the clock. Compiled code is never taken from an earlier run. What is not installed is
left out, and said.
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.compare_contestants import Task
from benchmarks.compare_environment import ONNX2TORCH, ORT_PYTHON, hardware, missing_packages
from benchmarks.compare_networks import IMAGES, SIZES
from benchmarks.compare_protocol import Contestant

WAYS = {
    "onward": "onward, `speed.compile: auto`",
    "onward compiled": "onward, `speed.compile: true`",
    "onward uncompiled": "onward, `speed.compile: false`",
    "onward float8": "onward, matmuls in FP8",
    "onward CUDA graphs": "onward, recorded as CUDA graphs",
    "eager": "written by hand, eager",
    "compiled": "written by hand, torch.compile",
    "onnx2torch": "onnx2torch, eager",
    "onnxruntime-training": "onnxruntime-training 1.19.2",
}
SMALL = tuple(f"{model}:small" for model in SIZES)
REAL = ("gpt2:124M", "gpt2:355M", "gpt2:1.5B", "llama:110M", "llama:1B", "bert:base", "bert:large", "resnet50:real",
        "squeezenet:real")  # fmt: skip
WARM = 2
"""Steps after the first that are not counted."""
AGREEMENT = {False: 1e-4, True: 2e-2}
"""In bf16 or not -> the most that a loss may differ from the network's by hand, as a part of it."""


@dataclass
class Measured:
    """What one way of training a network took.

    Attributes:
        failure: why it was left out; None: it was not.
        first_step: seconds from the start of the process to the end of the first step; on a CPU, computed ones. 0: not
            known.
        rounds: median seconds of a step in each round.
        losses: of the first steps.
        tensor_bytes: the most that tensors took at once in a step; 0: not known.
        resident_bytes: the most that the process grew by, compiler included.
    """

    failure: str | None = None
    first_step: float = 0.0
    rounds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    tensor_bytes: int = 0
    resident_bytes: int = 0

    @property
    def step(self) -> float:
        """Seconds."""
        return statistics.median(self.rounds)

    def differs_by(self, other: Measured) -> float:
        """The most that a loss differs from another way's at the same step, as a part of it."""
        pairs = zip(self.losses, other.losses, strict=False)
        return max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)


def command_of(way: str, folder: Path, ort_python: str | None) -> list[str]:
    """What starts a way."""
    if way == "onnxruntime-training":
        assert ort_python is not None
        return [ort_python, "-m", "benchmarks.compare_ort", way, str(folder)]
    return [sys.executable, "-m", "benchmarks.compare_contestants", way, str(folder)]


@dataclass
class Race:
    """The ways of training one network, started or not.

    Attributes:
        task: which network.
        folder: with its files.
        failure: why it could not be prepared.
        work: what `prepare` told of it.
        runners: way -> its process.
        found: way -> what it took so far.
    """

    task: Task
    folder: Path
    failure: str | None = None
    work: dict[str, Any] = field(default_factory=dict)
    runners: dict[str, Contestant] = field(default_factory=dict)
    found: dict[str, Measured] = field(default_factory=dict)

    def prepare(self) -> None:
        """Writes batches and ONNX files."""
        (self.folder / "task.json").write_text(json.dumps(asdict(self.task)))
        done = subprocess.run(command_of("prepare", self.folder, None), capture_output=True, text=True)
        if done.returncode:
            self.failure = done.stderr.strip().splitlines()[-1]
        else:
            self.work = json.loads((self.folder / "work.json").read_text())

    def start(self, way: str, ort_python: str | None) -> None:
        """Trains a first step and those that are not counted."""
        on_cpu = self.task.device == "cpu"
        environment = {
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache" / way.replace(" ", "-")),
            "OMP_NUM_THREADS": str(self.task.threads),
        }
        if on_cpu:
            environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # in this process, whose computing is counted
        command, found = command_of(way, self.folder, ort_python), self.found.setdefault(way, Measured())
        runner = Contestant(way, command, environment, self.folder / f"{way}.log")
        self.runners[way] = runner
        first = runner.ask("steps 1")
        if first is not None:
            found.first_step = first["cpu_total"] if on_cpu else first["since_start"]
            found.losses = first["losses"]
            runner.ask(f"steps {WARM}")

    def run(self, ways: Sequence[str], rounds: int, steps: int) -> None:
        """Lets these take turns, and ends them."""
        kind = "cpu" if self.task.device == "cpu" else "wall"
        for _ in range(rounds):
            for way in ways:
                answer, found = self.runners[way].ask(f"steps {steps}"), self.found[way]
                if answer is not None:
                    found.rounds.append(statistics.median(answer[kind]))
                    text = f"{self.task.model} {way}: {1e3 * found.rounds[-1]:.1f} ms a step"
                    print(text, file=sys.stderr, flush=True)
                    found.losses += answer["losses"]
        for way in ways:
            runner, found = self.runners[way], self.found[way]
            memory = runner.ask("memory") if way != "product" else None
            if memory is not None:
                found.tensor_bytes, found.resident_bytes = memory["tensor_bytes"], memory["resident_bytes"]
            found.failure = runner.failure
            runner.end()

    def result(self, profiles: Path | None) -> dict[str, Any]:
        """What was found; the profile of a step of each way goes into a folder."""
        if self.failure is not None:
            return {"task": asdict(self.task), "failure": self.failure}
        for path in self.folder.glob("*.profile") if profiles is not None else ():
            assert profiles is not None
            profiles.mkdir(parents=True, exist_ok=True)
            name = f"{self.task.model}-{self.task.size}-{path.stem.replace(' ', '-')}.txt"
            (profiles / name).write_text(path.read_text())
        product = self.found.pop("product")
        return {
            "task": asdict(replace(self.task, onnx2torch=None)),
            "size": asdict(SIZES[self.task.model][self.task.size]),
            "work": self.work,
            "product_rate": statistics.median(product.losses) if product.losses else 0.0,
            "ways": {way: asdict(found) for way, found in self.found.items()},
        }


def compare(
    task: Task,
    ways: Sequence[str],
    rounds: int,
    steps: int,
    ort_python: str | None,
    in_turns: bool,
    profiles: Path | None = None,
) -> dict[str, Any]:
    """Measures all ways of training one network.

    Args:
        task: which.
        ways: of `WAYS`.
        rounds, steps: turns of each way, and steps of a turn.
        ort_python: of the environment with onnxruntime-training.
        in_turns: all are alive at once; else one after the other, for networks of which a GPU holds one only.
        profiles: a folder for the profile of a step of each way.
    """
    with tempfile.TemporaryDirectory() as name:
        race = Race(task, Path(name))
        race.prepare()
        every = [*ways, "product"] if race.failure is None else []
        for group in [every] if in_turns else [[way] for way in every]:
            for way in group:  # one at a time: processes that start together would wait for each other
                race.start(way, ort_python)
            race.run(group, rounds, steps)
        return race.result(profiles)


def compare_at_once(
    tasks: Sequence[Task], ways: Sequence[str], rounds: int, steps: int, ort_python: str | None, profiles: Path | None
) -> Iterator[dict[str, Any]]:
    """`compare` of several networks, all of whose processes start at once and are alive together.

    Compiling takes most of the time on a GPU, and many cores; how long first steps take then tells nothing, and is
    left out.
    """
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(len(tasks) * (len(ways) + 1)) as pool:
        races = [Race(task, Path(name) / str(place)) for place, task in enumerate(tasks)]
        for race in races:
            race.folder.mkdir()
        list(pool.map(Race.prepare, races))
        ready = [race for race in races if race.failure is None]
        for race in ready:
            race.found = {way: Measured() for way in (*ways, "product")}  # in this order in the table
        starts = [pool.submit(race.start, way, ort_python) for race in ready for way in (*ways, "product")]
        for start in starts:
            start.result()
        for race in races:
            if race.failure is None:
                race.run([*ways, "product"], rounds, steps)
            for found in race.found.values():
                found.first_step = 0.0
            yield race.result(profiles)


HEADER = (
    "",
    "step (of rounds)",
    "samples/s",
    "tokens/s",
    "of the product rate",
    "onward's throughput (of rounds)",
    "peak of tensors",
    "process grew by",
    "onward's memory",
    "first step",
    "100th step, reckoned",
    "onward's time to the first",
    "loss",
    "its difference, at most",
)


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    task = result["task"]
    title = f"### {task['model']} {task['size']}\n\n"
    if "failure" in result:
        return f"{title}not prepared: {result['failure']}\n"
    size, work, rate = result["size"], result["work"], result["product_rate"]
    is_of_images = task["model"] in IMAGES
    shape = f"batch {size['batch']}, {'images of ' if is_of_images else 'tokens '}{size['length']}"
    bound = AGREEMENT[task["bf16"]]
    ways = {way: Measured(**found) for way, found in result["ways"].items()}
    measured = {way: found for way, found in ways.items() if found.failure is None and found.rounds}
    # No network is faster than the machine: then the rate was measured while something else ran.
    is_rate_right = rate > 0 and all(work["flops"] / found.step <= rate for found in measured.values())
    products = (
        f"{rate / 1e9:.1f} GFLOP/s" if is_rate_right else "at a rate that was measured wrongly: below a network's"
    )
    lines = [
        f"{title}{work['weights'] / 1e6:.1f} M weights, {shape}, {'bf16' if task['bf16'] else 'fp32'}; matrix products "
        f"{products}. Losses are to agree with the network's by hand to {bound:.0e} of their size.\n",
        f"| {' | '.join(HEADER)} |",
        "|---" * len(HEADER) + "|",
    ]
    by_hand = next((measured[way] for way in ("eager", "compiled") if way in measured), None)
    for way, found in ways.items():
        if way not in measured:
            lines.append(f"| {WAYS[way]} | left out: {found.failure} |" + " |" * (len(HEADER) - 2))
            continue
        own = measured.get("onward") if way != "onward" else None
        throughput, memory, first = ("", "", "") if own is None else _ratios(own, found)
        difference = ""
        if by_hand is not None and by_hand is not found:
            differs_by = found.differs_by(by_hand)
            difference = f"{differs_by:.0e}" if differs_by <= bound else f"**{differs_by:.0e}: does not agree**"
        cells = [
            WAYS[way],
            f"{found.step * 1e3:.1f} ms ({min(found.rounds) * 1e3:.0f} to {max(found.rounds) * 1e3:.0f})",
            f"{size['batch'] / found.step:.1f}",
            "" if is_of_images else f"{size['batch'] * size['length'] / found.step:.0f}",
            f"{100 * work['flops'] / found.step / rate:.0f} %" if is_rate_right else "not known",
            throughput,
            f"{found.tensor_bytes / 1e6:.0f} MB" if found.tensor_bytes else "not known",
            f"{found.resident_bytes / 1e6:.0f} MB",
            memory,
            f"{found.first_step:.1f} s" if found.first_step else "",
            f"{found.first_step + 99 * found.step:.0f} s" if found.first_step else "",
            first,
            f"{found.losses[0]:.5f} to {found.losses[-1]:.5f}",
            difference,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _ratios(own: Measured, found: Measured) -> tuple[str, str, str]:
    """Throughput with its spread, memory and time to the first step of onward, as parts of another way's."""
    pairs = [other / mine for mine, other in zip(own.rounds, found.rounds, strict=True)]
    tensors = f"{own.tensor_bytes / found.tensor_bytes:.2f}" if found.tensor_bytes else ""
    return (
        f"{statistics.median(pairs):.2f} ({min(pairs):.2f} to {max(pairs):.2f})",
        tensors or f"{own.resident_bytes / found.resident_bytes:.2f} (grown)",
        f"{own.first_step / found.first_step:.2f}" if found.first_step else "",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("tasks", nargs="*", metavar="MODEL:SIZE", help="by default all small ones, or all real ones")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default_device)
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="by default all but those of onward with other fields")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--ort-python", default=ORT_PYTHON, help="of an environment with onnxruntime-training 1.19.2")
    parser.add_argument("--onnx2torch", default=ONNX2TORCH, help="a folder to import it from, if it is not installed")
    parser.add_argument("--clip", type=float, help="the largest gradient norm; nothing is clipped without it")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--one-by-one", action="store_true", help="one process at a time, for networks that fill a GPU")
    order.add_argument("--at-once", action="store_true", help="start all networks' processes together, to save time")
    parser.add_argument("--profiles", type=Path, help="a folder for the profile of a step of each way")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    tasks = options.tasks or (REAL if on_gpu else SMALL)
    for task in tasks:
        model, _, size = task.partition(":")
        if size not in SIZES.get(model, {}):
            listed = ", ".join(f"{m}:{s}" for m, sizes in SIZES.items() for s in sizes)
            parser.error(f"{task!r} is none of: {listed}")
    ways = options.ways or [way for way in WAYS if not way.startswith("onward ")]
    missing = missing_packages(options.ort_python, options.onnx2torch)
    if options.clip is not None and "onnxruntime-training" in ways:
        parser.error("onnxruntime-training cannot be asked to clip here; list the other ways with --ways.")
    ways = [way for way in ways if way not in missing]
    date = datetime.date.today().isoformat()
    heading = f"# Training side by side, {date}\n\n{hardware(options.device, options.threads)}\n\n"
    turns = f"--rounds {options.rounds} --steps {options.steps} --threads {options.threads}"
    turns += " --at-once" if options.at_once else ""
    turns += "" if options.clip is None else f" --clip {options.clip:g}"
    load = f"{os.getloadavg()[0]:.0f} other processes wanted the {os.cpu_count()} cores when it began"
    command = f"`python -m benchmarks.compare {' '.join(tasks)} {turns}`; {load}.\n"  # without paths of this machine
    command += "".join(f"{name} is missing here: {what}.\n" for name, what in missing.items())
    print(heading + command, flush=True)
    stem = f"{date}-{options.device}-{'-'.join(task.replace(':', '-') for task in tasks)}"
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = [
        Task(*text.split(":"), options.device, on_gpu, True, options.threads, options.onnx2torch, options.clip)  # type: ignore[call-arg]
        for text in tasks
    ]
    measure = (ways, options.rounds, options.steps, options.ort_python)
    in_turns, profiles = not options.one_by_one, options.profiles
    one_by_one = (compare(task, *measure, in_turns, profiles) for task in wanted)
    results = list[dict[str, Any]]()
    for found in compare_at_once(wanted, *measure, profiles) if options.at_once else one_by_one:
        results.append(found)
        print(table(found), flush=True)
        record = {"date": date, "hardware": hardware(options.device, options.threads), "missing": missing}
        record["results"] = results  # type: ignore[assignment]
        (options.out / f"{stem}.json").write_text(json.dumps(record, indent=1) + "\n")
        (options.out / f"{stem}.md").write_text(heading + command + "\n" + "\n".join(map(table, results)))


if __name__ == "__main__":
    main()
