"""Operators of ai.onnx.ml: every attribute against onnxruntime, gradients against finite differences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import onward
from tests.fitted_models import run
from tests.one_classical_node import SCORES_OF, TRAINED, X, model_of


@pytest.mark.parametrize("op_type", TRAINED)
def test_gradients_by_finite_differences_in_onnxruntime(op_type: str, tmp_path: Path) -> None:
    """The gradient of every attribute: the attribute moved in the file itself, and computed by onnxruntime."""
    model = model_of(op_type, **TRAINED[op_type])
    net = onward.to_torch(model)
    attributes = [name for name in TRAINED[op_type] if f"node.{name}" in net.weights]
    assert {f"node.{name}" for name in attributes} == set(net.weights)
    output = "scores" if op_type in SCORES_OF else "y"
    x = torch.from_numpy(X).requires_grad_()
    results = net(x)
    result = results[-1] if isinstance(results, tuple) else results
    direction = torch.from_numpy(np.random.default_rng(0).standard_normal(result.shape).astype(np.float32))
    gradients = torch.autograd.grad((result * direction).sum(), [x, *net.weights.values()])

    def total(changed: onnx.ModelProto, features: np.ndarray = X) -> float:
        return float((run(changed, {"x": features})[output].astype(np.float64) * direction.numpy()).sum())

    step = 1e-2
    for name, gradient in zip(net.weights, gradients[1:], strict=True):
        attribute = name.removeprefix("node.")
        for place, number in enumerate(gradient.reshape(-1)):
            moved = []
            for sign in (1, -1):
                numbers = list(TRAINED[op_type][attribute])
                numbers[place] += sign * step
                moved.append(total(model_of(op_type, **{**TRAINED[op_type], attribute: numbers})))
            assert float(number) == pytest.approx((moved[0] - moved[1]) / (2 * step), rel=5e-3, abs=5e-3), name
    for place in np.ndindex(X.shape):
        if op_type == "Normalizer" and not X[place[0]].any():
            continue  # a row of zeros, where the norm has no gradient
        ahead, behind = X.copy(), X.copy()
        ahead[place] += step / 10
        behind[place] -= step / 10
        slope = (total(model, ahead) - total(model, behind)) / (step / 5)
        assert float(gradients[0][place]) == pytest.approx(slope, rel=1e-2, abs=1e-2)
