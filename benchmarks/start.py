"""What a start costs: `python -m benchmarks.start [--nodes 1000 10000] [--weights 1e9] [--folder DIR]`.

In CPU seconds of a process each, so that what else runs on the machine counts little: `onward inspect` of chains of
equal layers, `onward.to_torch` of an fp32 export with external data (random numbers; its file and as much memory must
be there) with its peak memory over its weights, and of `onward train` on a tiny GPT-2 the first line and the first
step, `import torch` apart, and the latter of the same network in a loop by hand. Modules are compiled once before
(bytecode is cached), as in an installed package.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onward.data import ShardWriter

WIDTH = 4096
"""Of the layers of the large model: 2 x 4096 x 5120 weights each."""

INNER = 5120

INSPECT = """
import contextlib, io, json, sys, time
from onward.cli import process
sys.argv = ["onward", "inspect", sys.argv[1]]
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    with contextlib.suppress(SystemExit):
        process()
print(json.dumps({"seconds": time.process_time(), "torch": "torch" in sys.modules}))
"""

TO_TORCH = """
import json, sys, time
import torch, onward
onward.to_torch(sys.argv[2])  # a small model: imports what the large one needs
def memory():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return {name: int(lines[name].split()[0]) * 1024 for name in ("VmHWM", "RssAnon", "RssFile")}
before, start = memory(), time.process_time()
net = onward.to_torch(sys.argv[1])
seconds, after = time.process_time() - start, memory()
weights = sum(weight.nbytes for weight in net.weights.values())
grown = {name: (after[name] - before[name]) / weights for name in after}
print(json.dumps({"seconds": seconds, "weights": weights / 4, **grown}))
"""

FIRST_STEP = """
import gc, io, json, os, sys, time
start = time.thread_time()
import torch
imported = time.thread_time()
seen = {"torch": imported - start}
class Screen(io.StringIO):
    def write(self, text):
        return len(text)
    def flush(self):
        pass
out, sys.stdout, sys.stderr = sys.stdout, Screen(), Screen()
gc.freeze()  # as `process` does: the collector never walks through modules
from onward.graph.reading.garbage_collection import importing
with importing():
    from onward.engine.steps import Steps
def first(self, *arguments, **named):
    update(self, *arguments, **named)
    out.write(json.dumps({**seen, "step": time.thread_time() - imported}))
    out.flush()
    os._exit(0)
update, Steps.update = Steps.update, first
from onward.cli import process
sys.argv = ["onward", "train", sys.argv[1]]
process()
"""

BY_HAND = """
import json, os, sys, time
start = time.thread_time()
import torch
imported = time.thread_time()
from benchmarks.compare_networks import Size, loss_of, make_batches, make_network
from torch.utils.tensorboard import SummaryWriter
size = Size(8, 128, layers=2, width=192, heads=3, inner=768, words=1024)
network, batch = make_network("gpt2", size), make_batches("gpt2", size, 1)[0]
writer = SummaryWriter(os.path.dirname(sys.argv[1]) + "/by_hand")
optimizer = torch.optim.AdamW(network.parameters(), fused=True)
loss = loss_of(network(batch["input_ids"]), batch["labels"])
loss.backward()
torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
optimizer.step()
writer.add_scalar("loss", float(loss), 1)
print(json.dumps({"torch": imported - start, "step": time.thread_time() - imported}), flush=True)
os._exit(0)
"""
"""The same network and loop written by hand, its data at hand."""

FIRST_LINE = """
import json, os, sys, time
class Screen:
    def write(self, text):
        os.write(1, json.dumps({"line": time.process_time()}).encode())
        os._exit(0)
    def flush(self):
        pass
    def isatty(self):
        return False
sys.stdout = sys.stderr = Screen()
from onward.cli import process
sys.argv = ["onward", "train", sys.argv[1]]
process()
"""


def write_chain(path: Path, nodes: int) -> None:
    """Layers of five nodes, with a product, a bias and a residual each."""
    made, tensors, last = [], [], "x"
    for index in range(nodes // 5):
        tensors.append(numpy_helper.from_array(np.full((8, 8), index + 1, np.float32), f"w{index}"))
        tensors.append(numpy_helper.from_array(np.full(8, index, np.float32), f"b{index}"))
        for op_type, inputs, output in (
            ("MatMul", [last, f"w{index}"], f"a{index}"),
            ("Add", [f"a{index}", f"b{index}"], f"c{index}"),
            ("Relu", [f"c{index}"], f"d{index}"),
            ("Tanh", [f"d{index}"], f"e{index}"),
            ("Add", [last, f"e{index}"], f"x{index}"),
        ):
            made.append(helper.make_node(op_type, inputs, [output]))
        last = f"x{index}"
    save(path, made, last, tensors, 8)


def write_large(path: Path, weights: float) -> None:
    """Layers of two products; their weights, random numbers, are in `<path>.data`."""
    made, tensors, last = [], [], "x"
    random = np.random.default_rng(0)
    with open(f"{path}.data", "wb") as file:
        for index in range(max(1, round(weights / (2 * WIDTH * INNER)))):
            for name, shape in ((f"l{index}.up", (WIDTH, INNER)), (f"l{index}.down", (INNER, WIDTH))):
                tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape)
                tensor.data_location = TensorProto.EXTERNAL
                place = {"location": f"{path.name}.data", "offset": file.tell(), "length": 4 * WIDTH * INNER}
                for key, value in place.items():
                    tensor.external_data.add(key=key, value=str(value))
                file.write(random.standard_normal(shape, np.float32).data)
                tensors.append(tensor)
            for op_type, inputs, output in (
                ("MatMul", [last, f"l{index}.up"], f"h{index}"),
                ("Relu", [f"h{index}"], f"r{index}"),
                ("MatMul", [f"r{index}", f"l{index}.down"], f"o{index}"),
                ("Add", [last, f"o{index}"], f"x{index}"),
            ):
                made.append(helper.make_node(op_type, inputs, [output]))
            last = f"x{index}"
    save(path, made, last, tensors, WIDTH)


def save(path: Path, nodes: list[onnx.NodeProto], last: str, tensors: list[TensorProto], width: int) -> None:
    """Writes the model, with an input and an output [n, width]."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [value("x", 1, ["n", width])], [value(last, 1, ["n", width])], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)


def write_run(folder: Path) -> Path:
    """A tiny GPT-2, a shard of random tokens, and the run.yaml of both."""
    from onward.cli import main

    model, tokens = folder / "gpt2.onnx", np.random.default_rng(0).integers(0, 1024, (64, 128))
    main(["create", "gpt2", "--size", "tiny", "--vocab-size", "1024", "-o", str(model)])
    (folder / "data").mkdir(exist_ok=True)
    with ShardWriter(folder / "data" / "0.pb") as writer:
        for row in tokens:
            writer.write({"input_ids": row, "labels": row})
    run = folder / "run.yaml"
    run.write_text(
        "paths: {model_path: gpt2.onnx, train_data_dir: data, output_dir: out}\n"
        "loss: {type: softmax_cross_entropy, prediction: logits, label: labels}\n"
        "training: {batch_size: 8, num_train_steps: 100}\n"
        "learning_rate: {initial_lr: 1.0e-3}\n"
        "optimizer: {training_optimizer_name: AdamW, max_norm_clip: 1.0}\n"
        "tensorboard: {log_dir: out/tensorboard}\n"
        "checkpoint: {checkpoints_dir: out/checkpoints, checkpoint_period: 400}\n"
    )
    return run


def measure(program: str, *arguments: object, folder: Path) -> dict[str, float]:
    """What a program of its own process prints, at the second run: the first compiles onward's modules."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    found: dict[str, float] = {}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", program, *map(str, arguments)], env=environment, check=True, capture_output=True
        )
        found = json.loads(done.stdout)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Measures and prints, one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="*", default=[1000, 10000], help="of the chains (1000 10000)")
    parser.add_argument("--weights", type=float, default=1e9, help="of the large model; 0: none (1e9)")
    parser.add_argument("--folder", type=Path, help="where the files go; absent: a temporary folder")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        folder = Path(made)
        for nodes in options.nodes:
            write_chain(folder / "chain.onnx", nodes)
            found = measure(INSPECT, folder / "chain.onnx", folder=folder)
            print(f"inspect, {nodes:,} nodes: {found['seconds']:.2f} s", flush=True)
        if options.weights:
            write_chain(folder / "small.onnx", 10)
            write_large(folder / "large.onnx", options.weights)
            found = measure(TO_TORCH, folder / "large.onnx", folder / "small.onnx", folder=folder)
            shares = f"peak {found['VmHWM']:.3f}, own {found['RssAnon']:.3f}, mapped {found['RssFile']:.3f}"
            size = f"{found['weights'] / 1e9:.2f}e9 weights"
            print(f"to_torch, {size}: {found['seconds']:.2f} s; memory by weights: {shares}", flush=True)
            (folder / "large.onnx.data").unlink()
        run = write_run(folder)
        line = measure(FIRST_LINE, run, folder=folder)["line"]
        print(f"train: first line after {line:.2f} s")
        for way, program in (("train", FIRST_STEP), ("by hand", BY_HAND)):
            found = measure(program, run, folder=folder)
            print(f"{way}: import torch {found['torch']:.2f} s, and from then to the first step {found['step']:.2f} s")


if __name__ == "__main__":
    main()
