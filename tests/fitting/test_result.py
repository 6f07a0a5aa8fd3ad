"""What the result of a fit says of itself, and that its network is the one that is exported, whatever was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from tests.fitting.pairs import DATA, PAIR, fit


def test_what_the_result_says() -> None:
    result = fit(steps=3, validation_fraction=0.2)
    assert repr(result).startswith("FitResult(3 updates, loss ")
    assert "; validation loss " in repr(result)
    assert repr(result.history).startswith("History(3 displayed updates, loss ")


FORMS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "a new head": {"head": {"num_classes": 6}},
    "adapters": {"adapter": {"rank": 2, "targets": ["w1", "w2"]}},
    "rounded": {"quantize_aware": {"weights": "int8", "per_channel": False}},
    "averaged": {"averaging": {"kind": "ema", "decay": 0.5}},
    "pruned": {"pruning": {"pattern": "magnitude", "sparsity": 0.5}},
}


@pytest.mark.parametrize("form", FORMS)
def test_the_network_computes_what_was_evaluated_and_is_exported(form: str, tmp_path: Path) -> None:
    """Rounded biases are integers in the file alone: their rounding moves a few activations by a step."""
    result = fit(steps=8, learning_rate=0.05, parameters=FORMS[form])
    (expected,) = onnxruntime.InferenceSession(result.export(tmp_path / "a.onnx")).run(None, {"x": DATA["x"]})
    found = result.net(torch.from_numpy(DATA["x"])).detach()
    loss = torch.nn.functional.cross_entropy(found, torch.from_numpy(DATA["label"]))
    assert result.evaluate(PAIR)["loss"] == pytest.approx(loss.item(), rel=1e-5)
    apart = np.abs(found.numpy() - expected)
    assert np.median(apart) < 0.01 if form == "rounded" else apart.max() < 1e-5


def test_the_network_of_a_file_in_qdq_form_is_the_trained_one(tmp_path: Path) -> None:
    rounded = {"quantize_aware": {"weights": "int8", "per_channel": False}}
    path = fit(steps=2, parameters=rounded).export(tmp_path / "qdq.onnx")
    result = fit(model=str(path), steps=8, learning_rate=0.05, parameters=rounded)
    assert {node.op_type for node in onnx.load(path).graph.node} >= {"QuantizeLinear", "DequantizeLinear"}
    (original,) = onnxruntime.InferenceSession(path).run(None, {"x": DATA["x"]})
    found = result.net(torch.from_numpy(DATA["x"])).detach()
    loss = torch.nn.functional.cross_entropy(found, torch.from_numpy(DATA["label"]))
    assert result.evaluate(PAIR)["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert np.abs(found.numpy() - original).max() > 0.1
