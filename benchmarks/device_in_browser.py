"""A device bundle beside TensorFlow.js in one page of a headless Chromium, in alternating turns.

`python -m benchmarks.device_in_browser FOLDER [MODEL:SIZE ...]`: FOLDER has a node_modules with @tensorflow/tfjs and
@tensorflow/tfjs-backend-wasm (`npm install --prefix FOLDER @tensorflow/tfjs @tensorflow/tfjs-backend-wasm`). Weights,
batches and losses are the same; a bundle's AdamW decays by 1e-6 a step, which TensorFlow.js's Adam does not. Times are
on the clock; each way uses one thread.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import json
import shutil
import statistics
import subprocess
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tests.clients.chromium import open_page

from benchmarks import compare_device
from benchmarks.compare import command_of
from benchmarks.compare_contestants import Task
from benchmarks.compare_networks import SIZES, make_network
from benchmarks.device_peers import ratio

CLIENT = Path(__file__).parent.parent / "clients" / "javascript"
RUNTIME = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm", "ort-wasm-simd-threaded.mjs")
TENSORFLOW = {
    "tfjs/dist": ("tf.min.js",),
    "tfjs-backend-wasm/dist": ("tf-backend-wasm.min.js", "tfjs-backend-wasm.wasm", "tfjs-backend-wasm-simd.wasm"),
}
PAGE = """<script src="tf/tf.min.js"></script><script src="tf/tf-backend-wasm.min.js"></script>
<script src="device_in_browser.js"></script>"""
TASKS = ("mnist:digits", "bert:tiny")


def build(folder: Path, task: Task, modules: Path) -> None:
    """The site of a comparison: the bundle, both runtimes, weights and batches."""
    (folder / "task.json").write_text(json.dumps(asdict(task)))
    subprocess.run(command_of("prepare", folder, None), capture_output=True, check=True)
    compare_device.write(folder, asdict(task))
    for place, names in TENSORFLOW.items():
        for name in names:
            (folder / "tf").mkdir(exist_ok=True)
            shutil.copy(modules / "@tensorflow" / place / name, folder / "tf")
    for name in RUNTIME:
        (folder / "runtime").mkdir(exist_ok=True)
        shutil.copy(CLIENT / "node_modules" / "onnxruntime-web" / "dist" / name, folder / "runtime")
    subprocess.run(["node", str(CLIENT / "build.js"), str(folder / "client")], check=True)
    shutil.copy(Path(__file__).with_suffix(".js"), folder)
    (folder / "index.html").write_text(PAGE)
    (folder / "work.json").write_text(json.dumps(_work(folder, task)))


def _work(folder: Path, task: Task) -> dict[str, Any]:
    size = SIZES[task.model][task.size]
    weights = {name: value.detach().numpy() for name, value in make_network(task.model, size).named_parameters()}
    for name, value in weights.items():
        if value.ndim == 4:  # TensorFlow's convolutions have channels last
            weights[name] = value.transpose(2, 3, 1, 0)
    if task.model == "mnist":
        rows = weights["fc1.weight"].reshape(128, 64, -1)
        weights["fc1.weight"] = rows.transpose(0, 2, 1).reshape(128, -1)
    batches: dict[str, dict[str, np.ndarray]] = {}
    for key, value in np.load(folder / "batches.npz").items():
        number, _, name = key.partition("/")
        batches.setdefault(number, {})[name] = value
    last = [{n: v.transpose(0, 2, 3, 1) if v.ndim == 4 else v for n, v in one.items()} for one in batches.values()]
    return {
        "network": task.model,
        "rate": task.rate,
        "options": {"heads": size.heads, "layers": size.layers},
        "weights": {name: _as_json(value) for name, value in weights.items()},
        "batches": [{name: _as_json(value) for name, value in batch.items()} for batch in last],
        "bundle_batches": [{name: _as_json(value) for name, value in batch.items()} for batch in batches.values()],
    }


def _as_json(array: np.ndarray) -> dict[str, Any]:
    dtype = "float32" if array.dtype == np.float32 else "int32"
    return {"shape": list(array.shape), "data": array.ravel().tolist(), "dtype": dtype}


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""


def measure(folder: Path, backends: list[str], rounds: int, steps: int) -> dict[str, Any]:
    """What the page found."""
    handler = functools.partial(_Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with open_page(f"http://127.0.0.1:{server.server_address[1]}/", folder) as page:
                page.wait_for("globalThis.compare !== undefined", 120)
                found: dict[str, Any] = page.evaluate(f"compare({json.dumps(backends)}, {rounds}, {steps})")
                return found
        finally:
            server.shutdown()


def table(task: Task, found: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        f"### {task.model} {task.size}, batch {SIZES[task.model][task.size].batch}\n",
        "| | step | bundle's speed (of rounds) | losses |",
        "|---|---|---|---|",
    ]
    own = found["onward device"]["rounds"]
    for way, one in sorted(found.items()):
        if "failure" in one:
            lines.append(f"| {way} | left out: {one['failure']} | | |")
            continue
        speed = "" if way == "onward device" else ratio(own, one["rounds"])
        losses = f"{one['losses'][0]:.5f} to {one['losses'][-1]:.5f}"
        lines.append(f"| {way} | {statistics.median(one['rounds']):.1f} ms | {speed} | {losses} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="whose node_modules has TensorFlow.js")
    parser.add_argument("tasks", nargs="*", default=TASKS, metavar="MODEL:SIZE", help="of mnist and bert")
    parser.add_argument("--backends", nargs="+", default=["wasm", "cpu", "webgl"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5, help="of a turn")
    options = parser.parse_args()
    for text in options.tasks:
        model, _, size = text.partition(":")
        task = Task(model, size, "cpu", False, True, 1)
        with tempfile.TemporaryDirectory() as name:
            build(Path(name), task, options.folder / "node_modules")
            print(table(task, measure(Path(name), options.backends, options.rounds, options.steps)), flush=True)


if __name__ == "__main__":
    main()
