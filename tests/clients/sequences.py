"""A bundle of a network on sequences whose length is open, and torch's losses of batches of several lengths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import torch
import yaml

from onward.device.bundle import write_bundle

LENGTHS = (8, 5, 12, 8, 1)
"""Of the batches; the model was exported, and its bundle written, for none of them in particular."""

WEIGHTS = {"w1": (6, 8), "w2": (8, 4)}

_MODEL = """
<ir_version: 10, opset_import: ["" : 18]>
sequences (float[batch,time,6] x) => (float[batch,4] logits) {
  axes = Constant <value_ints = [1]> ()
  turned = Transpose <perm = [0, 2, 1]> (x)
  scores = MatMul (x, turned)
  shares = Softmax <axis = -1> (scores)
  mixed = MatMul (shares, x)
  hidden = MatMul (mixed, w1)
  active = Tanh (hidden)
  mean = ReduceMean <keepdims = 0> (active, axes)
  logits = MatMul (mean, w2)
}
"""


def batches_of_lengths() -> list[dict[str, np.ndarray]]:
    """Batches of several lengths, and of several numbers of samples."""
    generator = np.random.default_rng(0)
    shapes = [(4 - index % 2, length) for index, length in enumerate(LENGTHS)]
    return [
        {
            "x": generator.standard_normal((samples, length, 6)).astype(np.float32),
            "label": generator.integers(0, 4, samples),
        }
        for samples, length in shapes
    ]


def write_sequence_bundle(folder: Path) -> list[float]:
    """Writes `bundle` into a folder; gives torch's losses of `batches_of_lengths`, by SGD."""
    generator = np.random.default_rng(1)
    weights = {name: generator.standard_normal(size).astype(np.float32) for name, size in WEIGHTS.items()}
    model = onnx.parser.parse_model(_MODEL)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    onnx.save(model, folder / "model.onnx")
    run = {
        "paths": {"model_path": "model.onnx"},
        "loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "label"},
        "optimizer": {"training_optimizer_name": "SGDOptimizer"},
        "learning_rate": {"initial_lr": 0.5},
        "training": {"batch_size": 4, "num_train_steps": len(LENGTHS)},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    write_bundle(folder / "run.yaml", folder / "bundle")
    first, last = (torch.from_numpy(weights[name]).requires_grad_() for name in WEIGHTS)
    optimizer, losses = torch.optim.SGD([first, last], lr=0.5), list[float]()
    for batch in batches_of_lengths():
        x = torch.from_numpy(batch["x"])
        mixed = (x @ x.transpose(1, 2)).softmax(-1) @ x
        logits = (mixed @ first).tanh().mean(1) @ last
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(batch["label"]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
