"""What a step costs in addition to the network: `python -m benchmarks.loop [--size small] [--steps 40] [--runs 3]`.

Trains a GPT-2 through `TrainingRunner` with console, metrics file, TensorBoard, shuffled shards and asynchronous
checkpoints on, and counts the time spent inside the network: forward, backward, clipping, optimizer, and the end of
the gradients, as `zero_grad` in any loop. The rest is the loop's own: on the clock, and as what the main thread
computed, which other work on the machine does not touch. Next to it, in the same run: how fast batches come from disk
against how fast training takes them, how much of its time a consumer of 10,000 samples a second waits for them, and how
long a blocking and an asynchronous checkpoint of this state make training stand still. Medians over the runs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx_ir as ir
import torch

from onward.checkpoint.writing import CheckpointWriter
from onward.data.loader import DataLoader
from onward.data.shard_writer import ShardWriter
from onward.engine import gradient_reduction
from onward.engine import steps as engine_steps
from onward.engine.network.forward import Forward
from onward.environment import Environment
from onward.models import create_model
from onward.parameters import Parameters
from onward.report.console import ConsoleWatcher
from onward.run import Run
from onward.runner import TrainingRunner

SIZES = {
    "small": {"layers": 4, "heads": 4, "width": 128, "vocab_size": 1024, "context_length": 128},
    "medium": {"layers": 8, "heads": 8, "width": 256, "vocab_size": 4096, "context_length": 256},
}
BATCH = 8
PACE, PACED_BATCH = 10_000, 64
"""Samples a second of a consumer for whom data should always be there."""


NETWORK: tuple[tuple[Any, str], ...] = (
    (Forward, "__call__"),
    (torch.autograd, "backward"),
    (engine_steps, "clip"),
    (engine_steps, "take_step"),
    (gradient_reduction, "total_norm"),
)
"""Where a step calls what any loop around a network calls, too."""


@dataclass
class Stopwatch:
    """Sums the time spent in the functions it wraps: on the clock, and what this thread computed meanwhile."""

    seconds: float = 0.0
    computed_seconds: float = 0.0
    calls: Counter[str] = field(default_factory=Counter)

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__qualname__
        self.calls[name] = 0

        def timed(*arguments: Any, **named: Any) -> Any:
            self.calls[name] += 1
            started, computed = time.perf_counter(), time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - started
                self.computed_seconds += time.thread_time() - computed

        return timed

    def check(self) -> None:
        """Raises RuntimeError where what it was to time was never called: its time would count as the loop's own."""
        unseen = sorted(name for name, calls in self.calls.items() if not calls)
        if unseen:
            raise RuntimeError(f"not called in a whole run, so that their time counts as the loop's: {unseen}")


def prepare(folder: Path, size: dict[str, int]) -> None:
    """The model and ten shards of random tokens."""
    ir.save(create_model("gpt2", size="tiny", **size), folder / "model.onnx")
    (folder / "data").mkdir()
    generator = np.random.default_rng(0)
    length = size["context_length"]
    for number in range(10):
        with ShardWriter(folder / "data" / f"{number}.pb") as writer:
            for _ in range(200):
                tokens = generator.integers(0, size["vocab_size"], length + 1)
                writer.write({"input_ids": tokens[:-1], "labels": tokens[1:]})


def make_runner(folder: Path, out: Path, steps: int) -> TrainingRunner:
    """A run with everything on that a user would have on."""
    parameters = Parameters.from_mapping(
        {
            "paths": {"model_path": folder / "model.onnx", "train_data_dir": folder / "data"},
            "data": {"shuffle_data": True},
            "loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"},
            "training": {"batch_size": BATCH, "num_train_steps": steps, "display_loss_steps": 5},
            "learning_rate": {"initial_lr": 1e-3, "warmup_mode": "cosine", "warmup_steps": 5},
            "optimizer": {"training_optimizer_name": "AdamW", "max_norm_clip": 1.0},
            "checkpoint": {"checkpoints_dir": out / "checkpoints", "checkpoint_period": 20},
            "tensorboard": {"log_dir": out / "tensorboard"},
        }
    )
    log = open(out / "log.txt", "w")  # noqa: SIM115 - closed with the process
    runner = TrainingRunner(parameters, Environment(execution_provider="CPU"), [ConsoleWatcher(log)], progress=False)
    runner.initialize()
    return runner


def measure_loop(folder: Path, out: Path, steps: int) -> dict[str, float]:
    """Shares of a step, and samples a second, of one run; the first steps, which make the program, are left out."""
    out.mkdir()
    warm = 5
    watch = Stopwatch()
    runner = make_runner(folder, out, steps + warm)
    shown = Stopwatch()
    runner.watchers.on_step = shown.wrap(runner.watchers.on_step)  # type: ignore[method-assign]
    runner.state.drop_gradients = watch.wrap(runner.state.drop_gradients)  # type: ignore[method-assign]
    marks: list[tuple[int, float, float, float, float, float]] = []

    class Marks(ConsoleWatcher):
        def on_step(self, report: Any) -> None:
            computed = time.thread_time(), watch.computed_seconds, shown.computed_seconds
            marks.append((report.step, time.perf_counter(), computed[0], watch.seconds, *computed[1:]))

    runner.watchers.add([Marks(open(out / "marks.txt", "w"))])  # noqa: SIM115
    with ExitStack() as stack, DataLoader({}, folder / "data", shuffle=True) as loader:
        for home, name in NETWORK:
            stack.enter_context(patch.object(home, name, watch.wrap(getattr(home, name))))
        stack.enter_context(patch.object(Run, "save", shown.wrap(Run.save)))
        summary = runner.run(loader)
    runner.watchers.close()
    watch.check()
    shown.check()
    first = next(mark for mark in marks if mark[0] >= warm)
    last = marks[-1]
    total, computed, network, network_computed, told = (last[place] - first[place] for place in range(1, 6))
    return {
        "step_ms": 1e3 * total / (last[0] - first[0]),
        "outside_share": (total - network) / total,
        "outside_computed_share": (computed - network_computed) / computed,
        "told_share": told / computed,
        "samples_per_second": summary.stable_samples_per_second,
    }


def measure_data(folder: Path) -> float:
    """Samples a second that the loader gives when nobody computes."""
    with DataLoader({}, folder / "data", shuffle=True) as loader:
        batches = loader.batches(BATCH)
        next(batches)
        started, samples = time.perf_counter(), 0
        while time.perf_counter() - started < 2.0:
            samples += next(batches).sample_count
        return samples / (time.perf_counter() - started)


def measure_waits(folder: Path, seconds: float = 2.0) -> tuple[float, float, float]:
    """What share of its time a consumer of `PACE` samples a second waits for data, what of that its thread computes,
    and samples a second.

    It multiplies matrices between two batches, as training does, on one core.
    """
    matrix = torch.rand(256, 256)
    with DataLoader({}, folder / "data", shuffle=True) as loader:
        batches = loader.batches(PACED_BATCH)
        next(batches)
        watch, samples, started = Stopwatch(), 0, time.perf_counter()
        take = watch.wrap(lambda: next(batches))
        while time.perf_counter() - started < seconds:
            samples += take().sample_count
            while time.perf_counter() - started < samples / PACE:
                torch.mm(matrix, matrix)
        elapsed = time.perf_counter() - started
    return watch.seconds / elapsed, watch.computed_seconds / elapsed, samples / elapsed


def measure_stall(folder: Path, out: Path, blocking: bool) -> float:
    """Milliseconds that training stands still for one checkpoint of this model's state."""
    runner = make_runner(folder, out, 20)
    tensors = {name: sharded.tensor for name, sharded in runner.state.sharded_tensors().items()}
    stalls = []
    with CheckpointWriter(out / f"stall-{blocking}", 2, blocking=blocking) as writer:
        for number in range(6):
            started = time.perf_counter()
            writer.save(number, tensors, runner.state.record())
            stalls.append(time.perf_counter() - started)
            writer.wait()
    runner.watchers.close()
    return 1e3 * statistics.median(stalls[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, SIZES[options.size])
        loops = [measure_loop(folder, folder / f"run-{i}", options.steps) for i in range(options.runs)]
        data = [measure_data(folder) for _ in range(options.runs)]
        waits, computed, paces = zip(*(measure_waits(folder) for _ in range(options.runs)), strict=True)
        stalls = {}
        for blocking in (True, False):
            out = folder / f"stalls-{blocking}"
            out.mkdir()
            stalls[blocking] = measure_stall(folder, out, blocking)
    middle = {key: statistics.median(run[key] for run in loops) for key in loops[0]}
    supply = statistics.median(data)
    print(
        f"GPT-2 {options.size} {SIZES[options.size]}, batch {BATCH}, {torch.get_num_threads()} threads, "
        f"median of {options.runs} runs of {options.steps} steps"
    )
    print(f"a step                          {middle['step_ms']:10.2f} ms")
    print(f"outside the network, clock      {100 * middle['outside_share']:10.2f} %   (goal: under 1)")
    print(f"outside the network, computed   {100 * middle['outside_computed_share']:10.2f} %   (goal: under 1)")
    print(f"  of that reports, checkpoints  {100 * middle['told_share']:10.2f} %   (every 5 and every 20 steps)")
    print(f"training takes                  {middle['samples_per_second']:10.1f} samples/s")
    ratio = supply / middle["samples_per_second"]
    print(f"the loader gives                {supply:10.1f} samples/s, {ratio:.0f} times that")
    print(
        f"at {PACE:,} samples/s, waiting  {100 * statistics.median(waits):10.2f} %   (goal: under 1; "
        f"{100 * statistics.median(computed):.2f} computed; {statistics.median(paces):,.0f} samples/s reached)"
    )
    print(f"a blocking checkpoint stalls    {stalls[True]:10.1f} ms")
    print(f"an asynchronous one             {stalls[False]:10.1f} ms, {stalls[False] / stalls[True]:.2f} of it")


if __name__ == "__main__":
    main()
