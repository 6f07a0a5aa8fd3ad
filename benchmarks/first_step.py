"""Time to the first step of deep networks: `python -m benchmarks.first_step [--layers 2 8 24]`.

A GPT-2 of small width, compiled segment by segment (equal ones once) and compiled whole, each time in a process of its
own that finds nothing compiled before; beside them the same network uncompiled. On a CPU the seconds are those that
the process and its C++ compilers computed, so that what else runs on the machine counts not; on a GPU, on the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import torch

from benchmarks.compare_protocol import cpu_seconds
from onward.engine.compilation import Compilation
from onward.engine.forward import Forward
from onward.engine.network import Network, whole_network
from onward.engine.precision import Precision
from onward.graph.loss import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from onward.models import create_model
from onward.parameters import Recompute
from onward.plan.segments import plan_segments

WAYS = ("uncompiled", "segments", "whole")


def measure(way: str, layers: int, width: int) -> dict[str, float]:
    """Seconds from before the model is read to the end of the first backward pass; and those of a later step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = time.perf_counter if device.type == "cuda" else cpu_seconds
    size = {"layers": layers, "heads": 4, "width": width, "vocab_size": 512, "context_length": 64}
    model = create_model("gpt2", size="tiny", opset=17, dropout=0.0, **size)
    started = clock()
    loss = LossSpec("softmax_cross_entropy", prediction="logits", label="labels")
    graph = make_training_graph(model, loss=loss)
    assert graph.loss is not None
    net = OnnxModule(graph, (graph.loss,)).to(device)
    if way == "segments":
        network = Network(net, plan_segments(graph.model.graph, graph.weights, True, Recompute()))
    else:
        network = whole_network(net)
    network.compilation = None if way == "uncompiled" else Compilation(True, print)
    forward = Forward(network.train(), (graph.loss,), Precision(None))
    net.train()
    generator = torch.Generator().manual_seed(0)
    names = ("input_ids", "labels")
    features = {name: torch.randint(0, 512, (4, 64), generator=generator).to(device) for name in names}
    times, last = [], started
    for _ in range(6):
        (result,) = forward(features).values()
        result.backward()
        value = float(result.detach())
        times.append(clock() - last)
        last = clock()
    pieces = 0 if network.compilation is None else network.compilation.pieces
    return {"first": times[0], "later": min(times[2:]), "loss": value, "pieces": pieces}


def measure_apart(way: str, layers: int, width: int) -> dict[str, float]:
    """The same in a process of its own, without a cache."""
    command = [sys.executable, "-m", "benchmarks.first_step", "--one", way, "--layers", str(layers)]
    with tempfile.TemporaryDirectory() as cache:
        variables = {"TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        if not torch.cuda.is_available():
            variables["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # in the process whose computing is counted
        done = subprocess.run(
            [*command, "--width", str(width)], check=True, stdout=subprocess.PIPE, text=True, env=os.environ | variables
        )
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 24])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.layers[0], options.width)))
        return
    print("| layers | first step: uncompiled | by segment | whole | by segment / whole | pieces "
          "| later step: uncompiled | by segment | whole |\n|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    for layers in options.layers:
        found = {way: measure_apart(way, layers, options.width) for way in WAYS}
        plain, parts, whole = (found[way] for way in WAYS)
        assert abs(parts["loss"] - whole["loss"]) < 1e-4
        assert abs(plain["loss"] - whole["loss"]) < 1e-4
        first = " | ".join(f"{one['first']:.1f} s" for one in (plain, parts, whole))
        later = " | ".join(f"{one['later'] * 1e3:.1f} ms" for one in (plain, parts, whole))
        ratio = parts["first"] / whole["first"]
        print(f"| {layers} | {first} | {ratio:.2f} | {parts['pieces']:.0f} | {later} |", flush=True)


if __name__ == "__main__":
    main()
