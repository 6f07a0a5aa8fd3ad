"""Activations: gradients by finite differences, values against onnxruntime, points where formulas change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from onward.errors import ModelError
from tests.one_node import check_against_onnxruntime, check_gradients, make_model, run, to_array

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((2, 3, 4)) * 2

UNARY: list[tuple[str, dict[str, Any], int, bool]] = [
    ("Relu", {}, 14, True),
    ("LeakyRelu", {}, 16, True),
    ("LeakyRelu", {"alpha": 0.3}, 7, True),
    ("Elu", {}, 22, True),
    ("Elu", {"alpha": 0.7}, 7, True),
    ("Selu", {}, 22, True),
    ("Selu", {"alpha": 1.5, "gamma": 0.8}, 7, True),
    ("Celu", {}, 12, True),
    ("Celu", {"alpha": 0.6}, 28, False),
    ("Gelu", {}, 20, True),
    ("Gelu", {"approximate": "tanh"}, 20, True),
    ("HardSigmoid", {}, 22, True),
    ("HardSigmoid", {"alpha": 0.3, "beta": 0.4}, 7, True),
    ("HardSigmoid", {"alpha": 1 / 6, "beta": 0.5}, 7, True),
    ("HardSwish", {}, 14, True),
    ("Mish", {}, 18, True),
    ("Swish", {}, 24, False),
    ("Swish", {"alpha": 0.4}, 24, False),
    ("Sigmoid", {}, 13, True),
    ("Tanh", {}, 13, True),
    ("Softplus", {}, 22, True),
    ("Softsign", {}, 22, True),
    ("ThresholdedRelu", {}, 22, True),
    ("ThresholdedRelu", {"alpha": 0.2}, 10, True),
    ("Shrink", {}, 9, True),
    ("Shrink", {"bias": 0.4, "lambd": 0.8}, 9, True),
]


@pytest.mark.parametrize(("op_type", "attributes", "opset", "in_onnxruntime"), UNARY)
def test_gradients_and_values(op_type: str, attributes: dict[str, Any], opset: int, in_onnxruntime: bool) -> None:
    check_gradients(make_model(op_type, {"X": X}, attributes, opset), X)
    single = X.astype(np.float32)
    if in_onnxruntime:
        model = make_model(op_type, {"X": single}, attributes, min(opset, 22))
        check_against_onnxruntime(model, single, rtol=1e-5, atol=1e-6)


def test_swish_and_swiglu_by_their_formula() -> None:
    gate, value = RANDOM.standard_normal((2, 5)), RANDOM.standard_normal((2, 5))
    for alpha in (1.0, 0.7):
        swish = gate / (1 + np.exp(-alpha * gate))
        np.testing.assert_allclose(run(make_model("Swish", {"X": gate}, {"alpha": alpha}, 24), gate), swish, rtol=1e-7)
        model = make_model("SwiGLU", {"A": gate, "B": value}, {"alpha": alpha}, 28)
        np.testing.assert_allclose(run(model, gate, value), swish * value, rtol=1e-7)
        check_gradients(model, gate, value)


def test_swiglu_does_not_broadcast() -> None:
    gate, value = np.ones((2, 5)), np.ones((1, 5))
    with pytest.raises(ModelError, match=r"gate A \[2, 5\] and value B \[1, 5\] must have the same shape"):
        run(make_model("SwiGLU", {"A": gate, "B": value}, {}, 28), gate, value)


def test_celu_by_its_formula() -> None:
    expected = np.maximum(0, X) + np.minimum(0, 0.6 * (np.exp(X / 0.6) - 1))
    np.testing.assert_allclose(run(make_model("Celu", {"X": X}, {"alpha": 0.6}, 28), X), expected, rtol=1e-6)


def test_slope_of_prelu_broadcasts_from_opset_7_and_is_per_channel_before() -> None:
    per_channel = RANDOM.uniform(0.1, 0.9, 3)
    expected = np.where(X < 0, per_channel.reshape(1, 3, 1) * X, X)
    for opset in (1, 6):
        np.testing.assert_allclose(
            run(make_model("PRelu", {"X": X, "slope": per_channel}, {}, opset), X, per_channel), expected
        )
        shared = np.array([0.25])
        result = run(make_model("PRelu", {"X": X, "slope": shared}, {}, opset), X, shared)
        np.testing.assert_allclose(result, np.where(X < 0, 0.25 * X, X))
    for slope in (per_channel.reshape(3, 1), RANDOM.uniform(0.1, 0.9, 4), RANDOM.uniform(0.1, 0.9, X.shape)):
        model = make_model("PRelu", {"X": X, "slope": slope}, {}, 16)
        np.testing.assert_allclose(run(model, X, slope), np.where(X < 0, slope * X, X))
        check_gradients(model, X, slope)


def test_prelu_of_integers() -> None:
    x, slope = np.array([-2, 3], np.int32), np.array([3], np.int32)
    assert run(make_model("PRelu", {"X": x, "slope": slope}, {}, 16), x, slope).tolist() == [-6, 3]
    x, slope = np.array([2**63, 3], np.uint64), np.array([3], np.uint64)
    assert to_array(run(make_model("PRelu", {"X": x, "slope": slope}, {}, 16), x, slope)).tolist() == [2**63, 3]


def test_selu_before_opset_6_had_coarser_defaults() -> None:
    x = np.array([-1.0, 1.0])
    result = run(make_model("Selu", {"X": x}, {}, 1), x)
    np.testing.assert_allclose(result, [1.0507 * 1.6732 * (np.exp(-1) - 1), 1.0507], rtol=1e-7)


def test_softplus_neither_overflows_nor_loses_float64_digits() -> None:
    x = np.array([-800.0, -40.0, 0.0, 25.0, 39.0, 41.0, 800.0])
    expected = np.logaddexp(0, x)
    np.testing.assert_allclose(run(make_model("Softplus", {"X": x}, {}, 22), x), expected, rtol=1e-15)


def test_shrink_of_integers_keeps_their_type() -> None:
    x = np.array([-3, -1, 0, 1, 3], np.int8)
    result = run(make_model("Shrink", {"input": x}, {"lambd": 1.5, "bias": 1.5}, 9), x)
    assert result.dtype == torch.int8
    assert result.tolist() == [-1, 0, 0, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_half(dtype: torch.dtype) -> None:
    x = torch.tensor(X).to(dtype)
    for op_type, function in (("Gelu", F.gelu), ("Sigmoid", torch.sigmoid), ("Softplus", F.softplus), ("Mish", F.mish)):
        result = run(make_model(op_type, {"X": x}, {}, 22), x)
        assert result.dtype == dtype
        torch.testing.assert_close(result, function(x), rtol=1e-2, atol=1e-2)
