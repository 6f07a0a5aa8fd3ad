"""What fusion gains: `python -m benchmarks.fusion [--steps 7] [--rounds 3] [--threads 1] [MODEL ...]`.

Trains each model with and without fusion on the same random tokens, in turns, each time in its own process, and
prints the median time of a step (forward, backward, AdamW; on a CPU, of all threads together) and the peak memory
above that before the first step.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from onward.graph.fusion.passes import FUSIONS
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.lowering.building.specialization import specialize
from onward.lowering.module import OnnxModule
from onward.models import create_model


@dataclass(frozen=True)
class Case:
    """A model, and how much of it goes through a step.

    Attributes:
        name: of the model.
        options: of `onward create`.
        batch, sequence: samples and tokens of a step.
    """

    name: str
    options: dict[str, Any]
    batch: int
    sequence: int


CASES = {
    "gpt2-tiny": Case("gpt2", {"size": "tiny", "opset": 17, "dropout": 0.0}, 8, 128),
    "gpt2-small": Case("gpt2", {"size": "small", "opset": 17, "dropout": 0.0}, 2, 256),
    "gpt2-wide": Case(
        "gpt2",
        {
            "layers": 2,
            "heads": 4,
            "width": 256,
            "vocab_size": 50257,
            "context_length": 512,
            "opset": 17,
            "dropout": 0.0,
        },
        8,
        256,
    ),
    "bert-tiny": Case("bert", {"size": "tiny", "opset": 14, "dropout": 0.0}, 8, 128),
}


def prepare(
    case: Case, fused: bool, off: tuple[str, ...], device: torch.device
) -> tuple[OnnxModule, Callable[[], torch.Tensor]]:
    """A network, and its loss of one batch, by the program for the shapes of that batch."""
    generator = torch.Generator().manual_seed(0)
    shape = (case.batch, case.sequence)
    if case.name == "bert":
        loss = LossSpec(type="bert")
        masked = case.sequence * 15 // 100
        features = {
            "input1": torch.randint(0, 512, shape, generator=generator),
            "input2": torch.zeros(shape, dtype=torch.int64),
            "input3": torch.ones(shape, dtype=torch.int64),
            "masked_lm_positions": torch.arange(masked).expand(case.batch, masked).contiguous(),
            "masked_lm_ids": torch.randint(1, 512, (case.batch, masked), generator=generator),
            "next_sentence_labels": torch.zeros(case.batch, dtype=torch.int64),
        }
    else:
        loss = LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels")
        features = {name: torch.randint(0, 512, shape, generator=generator) for name in ("input_ids", "labels")}
    graph = make_training_graph(
        create_model(case.name, **case.options), loss=loss, count_correct=True, fuse=fused, fusions_off=off
    )
    assert graph.loss is not None
    net = OnnxModule(graph, (graph.loss,)).to(device).train()
    inputs = [features[name].to(device) for name in net.program.inputs]
    tensors = net.tensors_by_name()
    program = specialize(net.program, device, inputs, tensors, frozenset(tensors) - {*graph.weights, *graph.states})
    return net, lambda: program(True, device, inputs, tensors)[0]


def peak_bytes(device: torch.device) -> int:
    """The most memory that was in use so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(case: Case, fused: bool, off: tuple[str, ...], steps: int, threads: int) -> dict[str, float]:
    """Median seconds of a step, peak memory above that before the first one, and the last loss."""
    torch.set_num_threads(threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net, compute_loss = prepare(case, fused, off, device)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4, fused=True)
    # On a CPU, the time that this process computed: what others do on the machine does not count.
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    before, times, loss = peak_bytes(device), [], 0.0
    for _ in range(steps + 2):
        started = clock()
        result = compute_loss()
        result.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = float(result.detach())
        times.append(clock() - started)
    return {"seconds": statistics.median(times[2:]), "bytes": peak_bytes(device) - before, "loss": loss}


def measure_apart(name: str, fused: bool, off: tuple[str, ...], steps: int, threads: int) -> dict[str, float]:
    """The same in its own process."""
    command = [sys.executable, "-m", "benchmarks.fusion", "--one", name, "--steps", str(steps)]
    command += ["--threads", str(threads), *(["--off", *off] if fused else ["--off", *FUSIONS])]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(CASES), metavar="MODEL")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--off", nargs="*", default=[], help="fusions to leave out")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        off = tuple(arguments.off)
        print(
            json.dumps(measure(CASES[arguments.one], set(off) < set(FUSIONS), off, arguments.steps, arguments.threads))
        )
        return
    print(f"{'model':<12} {'ms a step':>20} {'ratio':>6} {'peak MB':>17} {'ratio':>6}  loss (unfused, fused)")
    for name in arguments.models:
        found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        for _ in range(arguments.rounds):
            for fused in (False, True):
                found[fused].append(
                    measure_apart(name, fused, tuple(arguments.off), arguments.steps, arguments.threads)
                )
        middle = {
            fused: {key: statistics.median(one[key] for one in runs) for key in ("seconds", "bytes", "loss")}
            for fused, runs in found.items()
        }
        plain, fused_run = middle[False], middle[True]
        print(
            f"{name:<12} {plain['seconds'] * 1e3:>9.1f} {fused_run['seconds'] * 1e3:>10.1f} "
            f"{fused_run['seconds'] / plain['seconds']:>6.2f} {plain['bytes'] / 1e6:>8.0f} "
            f"{fused_run['bytes'] / 1e6:>8.0f} {fused_run['bytes'] / plain['bytes']:>6.2f}  "
            f"{plain['loss']:.6f} {fused_run['loss']:.6f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
