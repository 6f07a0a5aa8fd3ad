"""onnxruntime-training 1.19.2 on the ONNX file with its loss, in a process of the environment that has it.

Reads nothing of onward or torch: numpy, onnx and onnxruntime-training are all that it needs.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import onnx

# Its optimizers for torch's modules import torch, which nothing here needs.
sys.modules.setdefault("onnxruntime.training.optim", types.ModuleType("onnxruntime.training.optim"))

from onnxruntime import SessionOptions  # noqa: E402
from onnxruntime.training import artifacts, onnxblock  # noqa: E402
from onnxruntime.training.api import CheckpointState, Module, Optimizer  # noqa: E402

from benchmarks.compare_protocol import profile_if_asked, reset_peak, resident_bytes, say, serve  # noqa: E402


def make_step(folder: Path, task: dict[str, Any]) -> Any:
    """A step with ORT's own AdamW, set as torch's."""
    model = onnx.load(folder / "loss.onnx")
    weights = [i.name for i in model.graph.initializer if i.data_type == 1 and i.name.startswith("network.")]
    statistics = [name for name in weights if name.endswith(("running_mean", "running_var"))]
    trained = [name for name in weights if name not in statistics]
    out = folder / "ort"
    out.mkdir(exist_ok=True)
    artifacts.generate_artifacts(
        model,
        requires_grad=trained,
        frozen_params=[i.name for i in model.graph.initializer if i.name not in trained],
        optimizer=onnxblock.optim.AdamW(eps=1e-8, weight_decay=0.01),
        artifact_directory=str(out),
    )
    state = CheckpointState.load_checkpoint(str(out / "checkpoint"))
    options = SessionOptions()
    options.intra_op_num_threads = task["threads"]
    profile_if_asked(options, folder, "onnxruntime-training")
    # Without the graph for evaluation, which it makes wrongly of batch normalization.
    module = Module(str(out / "training_model.onnx"), state, device=task["device"], session_options=options)
    optimizer = Optimizer(str(out / "optimizer_model.onnx"), module)
    optimizer.set_learning_rate(json.loads((folder / "work.json").read_text())["rate"])
    stored = np.load(folder / "batches.npz")
    count = len({key.split("/")[0] for key in stored})
    feature = next(key.split("/")[1] for key in stored if not key.endswith("labels"))
    batches = [(stored[f"{i}/{feature}"], stored[f"{i}/labels"]) for i in range(count)]
    module.train()

    def step(number: int) -> float:
        loss = module(*batches[number % count])
        optimizer.step()
        module.lazy_reset_grad()
        return float(np.asarray(loss).reshape(-1)[0])

    return step


def main() -> None:
    folder = Path(sys.argv[2])
    task = json.loads((folder / "task.json").read_text())
    baseline = resident_bytes("VmRSS")
    reset_peak()
    try:
        step = make_step(folder, task)
    except Exception as error:
        said = str(error).strip().splitlines()
        say({"failure": f"{type(error).__name__}: {said[0][:200] if said else ''}"})
        raise

    def memory(one: Any) -> int:
        one()
        return 0  # its tensors are not torch's; what is resident tells

    serve(step, memory, baseline)


if __name__ == "__main__":
    main()
