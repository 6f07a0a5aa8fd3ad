"""What does not train by its evidence, and how that is reported: quantized weights, signal tables, lifted constants."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest

import onward
from onward.errors import ParametersError
from onward.graph.training_graph import make_training_graph
from onward.parameters import Parameters
from onward.runner import TrainingRunner
from tests.graph.weights.models_in_text import hann, model_of, normal


def test_windows_and_folded_constants_do_not_train() -> None:
    model = model_of(
        """(float[N, 64] x) => (float[N, 4] y)
        { a = Mul(x, window) b = Mul(a, gain) c = MatMul(b, dense) d = Add(c, const_fold_opt__211)
          e = Add(d, bias) y = Mul(e, const_fold_opt__7) }""",
        window=hann(64).astype(np.float32), gain=normal(64), dense=normal(64, 4), bias=normal(4),
        const_fold_opt__211=np.float32([1.0]), const_fold_opt__7=normal(4),
    )  # fmt: skip
    for node in model.graph.node:
        node.input[:] = [name.replace("opt.", "opt__") for name in node.input]
    for tensor in model.graph.initializer:
        tensor.name = tensor.name.replace("opt.", "opt__")
    graph = make_training_graph(model)
    assert graph.weights == ("gain", "dense", "bias", "const_fold_opt__7")
    assert graph.frozen == {"window": "a window function", "const_fold_opt__211": "a constant folded by tf2onnx"}


def only_constants() -> onnx.ModelProto:
    return model_of("(float[N, 64] x) => (float[N, 64] y) { y = Mul(x, window) }", window=hann(64).astype(np.float32))


NOTHING = (
    "The model has no trainable weights. Its tensors are: 1 x a window function (window; 64 parameters, 256 bytes). "
    "List those that are parameters in training.weights_to_train (weights_to_train=[...] of onward.to_torch)."
)


def test_a_model_without_trainable_weights_is_reported(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=re.escape(NOTHING)):
        onward.to_torch(only_constants())
    onnx.save(only_constants(), tmp_path / "m.onnx")
    parameters = Parameters.from_mapping(
        {
            "paths": {"model_path": str(tmp_path / "m.onnx")},
            "loss": {"type": "mean_squared_error", "prediction": "y", "label": "t"},
            "training": {"num_train_steps": 1, "batch_size": 1},
            "learning_rate": {"initial_lr": 0.1},
        }
    )
    with pytest.raises(ParametersError) as raised:
        TrainingRunner(parameters).initialize()
    assert str(raised.value) == NOTHING
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(onward.to_torch(only_constants(), weights_to_train=["window"]).weights) == ["window"]
