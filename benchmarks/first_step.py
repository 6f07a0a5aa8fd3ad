"""Time to the first step of deep networks: `python -m benchmarks.first_step [--layers 1 8 24]`.

A GPT-2 of small width, written by hand and exported: onward uncompiled and compiled by segment (equal ones once), and
the module itself through `torch.compile`, each in its own process that finds nothing compiled before. On a CPU the
seconds are those that the process and its C++ compilers computed, so that what else runs on the machine counts not; on
a GPU, on the clock. Importing torch counts for nobody.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.compare_networks import Size, loss_of, make_batches, make_network
from benchmarks.compare_protocol import cpu_seconds
from onward.engine.network.compilation import Compilation
from onward.engine.network.forward import Forward
from onward.engine.network.network import Network
from onward.engine.network.precision import Precision
from onward.graph.losses.spec import LossSpec
from onward.graph.reading.model_file import read_model
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from onward.parameters import Recompute
from onward.plan.costs.segments import plan_segments

WAYS = ("uncompiled", "segments", "by hand")


def size_of(layers: int, width: int) -> Size:
    """What is trained."""
    return Size(4, 64, layers=layers, width=width, heads=4, inner=4 * width, words=512)


def make_by_hand(size: Size, device: torch.device) -> tuple[Callable[[Tensor, Tensor], Tensor], int]:
    """The loss of the module, compiled as one graph, and how many compiled graphs that makes."""
    network = make_network("gpt2", size).to(device)
    return torch.compile(lambda tokens, labels: loss_of(network(tokens), labels)), 1


def make_onward(path: Path, compiled: bool, device: torch.device) -> tuple[Callable[[Tensor, Tensor], Tensor], Network]:
    """The loss of the ONNX file."""
    loss = LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels")
    graph = make_training_graph(read_model(path), loss=loss, fuse=True)  # as a run does
    assert graph.loss is not None
    name = graph.loss
    net = OnnxModule(graph, (name,)).to(device)
    plan = plan_segments(graph.model.graph, graph.weights, True, Recompute(), blocks_joined=int(compiled))
    network = Network(net, plan)
    network.compilation = Compilation(True, print) if compiled else None
    forward = Forward(network.train(), (name,), Precision(None))
    net.train()

    def compute(tokens: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = forward({"input_ids": tokens, "labels": labels})[name]
        return found

    return compute, network


def measure(way: str, path: Path, layers: int, width: int) -> dict[str, float]:
    """Seconds from before the model is read to the end of the first backward pass; and those of a later step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = time.perf_counter if device.type == "cuda" else cpu_seconds
    batch = make_batches("gpt2", size_of(layers, width), 1)[0]
    tokens, labels = batch["input_ids"].to(device), batch["labels"].to(device)
    last = clock()
    network = None
    if way == "by hand":
        compute, graphs = make_by_hand(size_of(layers, width), device)
    else:
        compute, network = make_onward(path, way == "segments", device)
    made, times, value = clock() - last, [], 0.0
    for _ in range(6):
        loss = compute(tokens, labels)
        loss.backward()
        value = float(loss.detach())
        times.append(clock() - last)
        last = clock()
    if network is not None:
        graphs = 0 if network.compilation is None else network.compilation.graph_count
    return {"first": times[0], "made": made, "later": min(times[2:]), "loss": value, "graphs": graphs}


def measure_apart(way: str, path: Path, layers: int, width: int, profile: Path | None) -> dict[str, float]:
    """The same in its own process, without a cache."""
    command = [sys.executable, "-m", "benchmarks.first_step", "--one", way, "--model", str(path)]
    command += ["--layers", str(layers), "--width", str(width)]
    if profile is not None:
        command += ["--profile", str(profile)]
    with tempfile.TemporaryDirectory() as cache:
        variables = {"TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        if not torch.cuda.is_available():
            variables["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # in the process whose computing is counted
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | variables)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def export(path: Path, size: Size) -> None:
    """The module as an ONNX file."""
    tokens = make_batches("gpt2", size, 1)[0]["input_ids"]
    names: dict[str, Any] = {"input_names": ["input_ids"], "output_names": ["logits"]}
    network = make_network("gpt2", size).eval()
    program = torch.onnx.export(network, (tokens,), dynamo=True, optimize=False, verbose=False, **names)
    assert program is not None
    program.save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 8, 24])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--profile", type=Path, help="where the profile of the first step goes; of one way and depth")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        arguments = options.one, options.model, options.layers[0], options.width
        if options.profile is None:
            print(json.dumps(measure(*arguments)))
            return
        profiler = cProfile.Profile()
        found = profiler.runcall(measure, *arguments)
        with options.profile.open("w") as out:
            pstats.Stats(profiler, stream=out).sort_stats("cumulative").print_stats(120)
        print(json.dumps(found))
        return
    print("| layers | way | first step | of that until the model is read | of one made by hand | of the fewest layers' "
          "| graphs | later step |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    fewest: dict[str, float] = {}
    for layers in options.layers:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            export(path, size_of(layers, options.width))
            by_way = {
                way: measure_apart(way, path, layers, options.width, options.profile) for way in reversed(options.ways)
            }
        losses = [one["loss"] for one in by_way.values()]
        assert max(losses) - min(losses) < 1e-4, losses
        for way, one in by_way.items():
            by_hand = f"{one['first'] / by_way['by hand']['first']:.2f}" if "by hand" in by_way else ""
            depth = one["first"] / fewest.setdefault(way, one["first"])
            print(f"| {layers} | {way} | {one['first']:.1f} s | {one['made']:.1f} s | {by_hand} | {depth:.2f} "
                  f"| {one['graphs']:.0f} | {one['later'] * 1e3:.1f} ms |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
