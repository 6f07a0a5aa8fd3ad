"""Attention masks that the training graph computes from a number per token, compared with masks in the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from onward.data.in_memory import InMemoryDataLoader
from onward.errors import ModelError
from onward.graph.repair.segment_masks import compute_segment_masks
from onward.parameters import Parameters
from onward.runner import TrainingRunner
from tests.mlp import ON_ONE_THREAD, weights_of
from tests.plan.staged_models import Sketch

LENGTH, WIDTH = 7, 4
LOWEST = float(np.finfo(np.float32).min)


def model(dtype: ir.DataType = ir.DataType.BOOL, shape: tuple[Any, ...] = ("batch", 1, "n", "n")) -> ir.Model:
    """Attention of one head, whose mask selects scores, or is added to them."""
    sketch = Sketch(seed=1)
    x = sketch.input("x", ["batch", "n", WIDTH])
    mask = sketch.input("attention_mask", list(shape), dtype)
    q, k = (sketch.node("MatMul", name, x, sketch.weight(f"{name}.weight", WIDTH, WIDTH)) for name in ("query", "key"))
    scores = sketch.node("MatMul", "scores", q, sketch.node("Transpose", "turned", k, perm=[0, 2, 1]))
    axes = sketch.weight("axes", array=np.array([1], np.int64))
    if len(shape) == 4:
        scores = sketch.node("Unsqueeze", "of_heads", scores, axes)
    if dtype is ir.DataType.FLOAT:
        scores = sketch.node("Add", "masked", scores, mask)
    else:
        if dtype is not ir.DataType.BOOL:
            mask = sketch.node("Cast", "flags", mask, to=int(ir.DataType.BOOL))
        scores = sketch.node("Where", "masked", mask, scores, sketch.weight("low", array=np.float32(LOWEST)))
    shares = sketch.node("Softmax", "shares", scores, axis=-1)
    if len(shape) == 4:
        shares = sketch.node("Squeeze", "of_one", shares, axes)
    return sketch.model(sketch.node("MatMul", "y", shares, x))


def samples() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    segments = np.array([[1, 1, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1], [1, 2, 3, 3, 3, 3, 0], [1, 1, 1, 2, 2, 2, 2]])
    x, t = generator.random((2, 4, LENGTH, WIDTH), dtype=np.float32)
    return {"x": x, "t": t, "segment_ids": segments}


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (ir.DataType.BOOL, ("batch", 1, "n", "n")),
        (ir.DataType.FLOAT, ("batch", "heads", "n", "n")),
        (ir.DataType.INT64, ("batch", "n", "n")),
    ],
)
def test_a_run_equals_that_of_masks_in_the_data(dtype: ir.DataType, shape: tuple[Any, ...], tmp_path: Path) -> None:
    """In every bit; the exported model has its own inputs."""
    data, found = samples(), []
    segments = data.pop("segment_ids")
    sees = (segments[:, :, None] == segments[:, None]) & np.tri(LENGTH, dtype=bool)
    mask = np.where(sees, 0, LOWEST).astype(np.float32) if dtype is ir.DataType.FLOAT else sees.astype(dtype.numpy())
    mask = mask[:, None] if len(shape) == 4 else mask
    ir.save(model(dtype, shape), tmp_path / "model.onnx")
    for number, given in enumerate(({"attention_mask": mask}, {"segment_ids": segments})):
        asked = {
            "paths": {"model_path": tmp_path / "model.onnx", "output_dir": tmp_path / str(number)},
            "loss": {"type": "mean_squared_error", "prediction": "y", "label": "t"},
            "data": {"segment_masks": {"attention_mask": "segment_ids"}} if number else {},
            "training": {"batch_size": 2, "num_train_steps": 4},
            "learning_rate": {"initial_lr": 0.1},
        }
        runner, loader = TrainingRunner(Parameters.from_mapping(asked), ON_ONE_THREAD), InMemoryDataLoader(data | given)
        runner.initialize(loader.feature_specs())
        runner.run(loader)
        runner.end_training()
        found.append(weights_of(runner))
        assert runner.graph.weights == ("query.weight", "key.weight")
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())
    written = ir.load(tmp_path / "1" / "model_trained.onnx")
    assert [value.name for value in written.graph.inputs] == ["x", "attention_mask"]


@pytest.mark.parametrize(
    ("name", "made", "words"),
    [
        ("mask", model(), "names 'mask'; the inputs of the model are 'x', 'attention_mask'"),
        ("x", model(), r"names 'x', which is float \[batch, n, 4\]; expected a mask \[batch, 1, sequence, sequence\]"),
        ("attention_mask", model(shape=("batch", 8, "n", "n")), r"which is bool \[batch, 8, n, n\]; expected a mask"),
    ],
)
def test_what_is_no_mask(name: str, made: ir.Model, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        compute_segment_masks(made, {name: "segment_ids"})
