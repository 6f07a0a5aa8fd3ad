"""Fused operators of com.microsoft equal onnxruntime's own kernels; gradients by finite differences in float64."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import onward
from onward.errors import NodeError
from tests.one_node import check_against_onnxruntime, check_gradients, make_model, normal, run

RANDOM = np.random.default_rng(0)
_draw = normal(RANDOM)
MICROSOFT = "com.microsoft"


def _check(
    op_type: str,
    inputs: dict[str, Any],
    attributes: dict[str, Any] | None = None,
    outputs: int = 1,
    tolerance: float = 1e-5,
) -> None:
    model = make_model(op_type, inputs, attributes, 20, outputs, domain=MICROSOFT)
    given = [value for value in inputs.values() if value is not None]
    check_against_onnxruntime(model, *given, rtol=10 * tolerance, atol=tolerance)


def _check_gradients(op_type: str, inputs: dict[str, Any], attributes: dict[str, Any] | None = None) -> None:
    wide = {
        name: value.astype(float) if value is not None and value.dtype == np.float32 else value
        for name, value in inputs.items()
    }
    model = make_model(op_type, wide, attributes, 20, domain=MICROSOFT)
    check_gradients(model, *(value for value in wide.values() if value is not None))


@pytest.mark.parametrize("flags", list(itertools.product((0, 1), repeat=4)))
def test_fused_mat_mul(flags: tuple[int, ...]) -> None:
    trans_a, trans_b, batch_a, batch_b = flags
    attributes = {"alpha": 0.7, "transA": trans_a, "transB": trans_b, "transBatchA": batch_a, "transBatchB": batch_b}
    left, right = [2, 3, 4, 5], [2, 3, 5, 6]
    left = [2, 3, 5, 4] if trans_a else left
    right = [2, 3, 6, 5] if trans_b else right
    left = [left[2], left[0], left[1], left[3]] if batch_a else left
    right = [right[2], right[0], right[1], right[3]] if batch_b else right
    inputs = {"A": _draw(*left), "B": _draw(*right)}
    _check("FusedMatMul", inputs, attributes)
    _check_gradients("FusedMatMul", inputs, attributes)


@pytest.mark.parametrize(
    ("activation", "parameters"),
    [
        ("Relu", {}),
        ("Sigmoid", {}),
        ("Tanh", {}),
        ("LeakyRelu", {"activation_alpha": 0.3}),
        ("Elu", {"activation_alpha": 0.7}),
        ("HardSigmoid", {"activation_alpha": 0.3, "activation_beta": 0.4}),
        ("Softplus", {}),
        ("Softsign", {}),
    ],
)
def test_fused_gemm(activation: str, parameters: dict[str, float]) -> None:
    inputs = {"A": _draw(3, 4), "B": _draw(5, 4), "C": _draw(5)}
    attributes = {"transB": 1, "alpha": 0.5, "beta": 2.0, "activation": activation, **parameters}
    _check("FusedGemm", inputs, attributes)
    _check_gradients("FusedGemm", inputs, attributes)


@pytest.mark.parametrize(
    ("activation", "parameters"),
    [("", []), ("Relu", []), ("LeakyRelu", [0.2]), ("Clip", [-0.3, 0.5]), ("HardSigmoid", [0.3, 0.4]), ("Tanh", [])],
)
def test_fused_conv(activation: str, parameters: list[float]) -> None:
    inputs = {"X": _draw(1, 2, 5, 6), "W": _draw(4, 1, 3, 3), "B": _draw(4)}
    attributes: dict[str, Any] = {"group": 2, "pads": [1, 1, 1, 1], "strides": [2, 1], "kernel_shape": [3, 3]}
    if activation:
        attributes |= {"activation": activation}
    if parameters:
        attributes |= {"activation_params": parameters}
    _check("FusedConv", inputs, attributes)
    if activation in ("", "Relu"):
        _check("FusedConv", {**inputs, "Z": _draw(1, 4, 3, 6)}, attributes)
    _check_gradients("FusedConv", inputs, attributes)


@pytest.mark.parametrize(
    ("op_type", "names", "attributes"),
    [
        ("Gelu", ["X"], {}),
        ("BiasGelu", ["A", "B"], {}),
        ("FastGelu", ["X"], {}),
        ("FastGelu", ["X", "bias"], {}),
        ("QuickGelu", ["X"], {}),
        ("QuickGelu", ["X"], {"alpha": 1.0}),
        ("QuickGelu", ["X"], {"alpha": 0.5}),
    ],
)
def test_gelus(op_type: str, names: list[str], attributes: dict[str, Any]) -> None:
    inputs = dict(zip(names, (_draw(2, 3, 8), _draw(8)), strict=False))
    _check(op_type, inputs, attributes)
    _check_gradients(op_type, inputs, attributes)


@pytest.mark.parametrize("optional", list(itertools.product((True, False), repeat=2)))
@pytest.mark.parametrize("skip", [(2, 3, 8), (1, 3, 8), (3, 8)])
def test_skip_layer_normalization(skip: tuple[int, ...], optional: tuple[bool, bool]) -> None:
    inputs = {"input": _draw(2, 3, 8), "skip": _draw(*skip), "gamma": _draw(8)}
    inputs |= {"beta": _draw(8) if optional[0] else None, "bias": _draw(8) if optional[1] else None}
    _check("SkipLayerNormalization", inputs, {"epsilon": 1e-5})
    _check_gradients("SkipLayerNormalization", inputs, {"epsilon": 1e-5})


@pytest.mark.parametrize("bias", [True, False])
def test_skip_simplified_layer_normalization(bias: bool) -> None:
    inputs = {"input": _draw(2, 3, 8), "skip": _draw(2, 3, 8), "gamma": _draw(8), "bias": _draw(8) if bias else None}
    _check("SkipSimplifiedLayerNormalization", inputs, {"epsilon": 1e-5})
    _check_gradients("SkipSimplifiedLayerNormalization", inputs, {"epsilon": 1e-5})


def test_the_sum_of_a_skip_normalization_is_output_3() -> None:
    inputs = {"input": _draw(2, 3, 8), "skip": _draw(2, 3, 8), "gamma": _draw(8)}
    for op_type in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"):
        model = make_model(op_type, inputs, {}, 20, 4, domain=MICROSOFT)
        for index in (1, 2):
            model.graph.node[0].output[index] = ""
        kept = [value for value in model.graph.output if value.name in ("output_0", "output_3")]
        del model.graph.output[:]
        model.graph.output.extend(kept)
        check_against_onnxruntime(model, *inputs.values(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axis", [-1, 1])
def test_simplified_layer_normalization_of_the_default_domain(axis: int) -> None:
    X = _draw(2, 3, 8)
    scale = _draw(*X.shape[axis % 3 :])
    for outputs in (1, 2):
        inputs = {"X": X, "scale": scale}
        model = make_model("SimplifiedLayerNormalization", inputs, {"axis": axis, "epsilon": 1e-4}, 20, outputs)
        check_against_onnxruntime(model, X, scale, rtol=1e-4, atol=1e-5)


def test_group_norm_and_its_skip_are_torchs() -> None:
    """onnxruntime has no kernel for the CPU."""
    X, gamma, beta, skip, bias = (torch.from_numpy(_draw(*s)) for s in ((2, 3, 4, 8), (8,), (8,), (2, 3, 4, 8), (8,)))

    def expected(x: torch.Tensor) -> torch.Tensor:
        return F.silu(F.group_norm(x.movedim(-1, 1), 4, gamma, beta, 1e-5)).movedim(1, -1)

    attributes = {"groups": 4, "activation": 1}
    inputs = {"X": X, "gamma": gamma, "beta": beta}
    model = make_model("GroupNorm", inputs, attributes, 20, domain=MICROSOFT)
    torch.testing.assert_close(run(model, *inputs.values()), expected(X))
    inputs |= {"skip": skip, "bias": bias}
    Y, total = run(make_model("SkipGroupNorm", inputs, attributes, 20, 2, domain=MICROSOFT), *inputs.values())
    torch.testing.assert_close((Y, total), (expected(X + skip + bias), X + skip + bias))
    inputs["skip"] = skip[:, 0, 0]
    Y, total = run(make_model("SkipGroupNorm", inputs, attributes, 20, 2, domain=MICROSOFT), *inputs.values())
    torch.testing.assert_close(total, X + skip[:, :1, :1] + bias)


def test_elementwise_fusions_are_their_parts() -> None:
    """onnxruntime has these for other devices only."""
    X, bias, skip = (torch.from_numpy(_draw(*s)) for s in ((2, 3, 8), (8,), (2, 3, 8)))
    model = make_model("BiasSplitGelu", {"X": X, "bias": bias}, {}, 20, domain=MICROSOFT)
    left, right = (X + bias).chunk(2, -1)
    torch.testing.assert_close(run(model, X, bias), left * F.gelu(right))
    model = make_model("BiasAdd", {"X": X, "bias": bias, "skip": skip}, {}, 20, domain=MICROSOFT)
    torch.testing.assert_close(run(model, X, bias, skip), X + bias + skip)
    attributes = {"axis": 2, "is_inner_broadcast": 1}
    model = make_model("BiasSoftmax", {"data": X, "bias": bias}, attributes, 20, domain=MICROSOFT)
    torch.testing.assert_close(run(model, X, bias), torch.softmax(X + bias, -1))
    image, kernel = torch.from_numpy(_draw(1, 5, 6, 2)), torch.from_numpy(_draw(3, 3, 3, 2))
    model = make_model("NhwcConv", {"X": image, "W": kernel}, {"pads": [1, 1, 1, 1]}, 20, domain=MICROSOFT)
    expected = F.conv2d(image.movedim(-1, 1), kernel.movedim(-1, 1), padding=1).movedim(1, -1)
    torch.testing.assert_close(run(model, image, kernel), expected)


def test_matrices() -> None:
    inputs = {"X": _draw(2, 4, 4)}
    _check("Inverse", inputs, tolerance=1e-4)
    _check_gradients("Inverse", inputs)
    _check("Trilu", inputs, {"upper": 0})
    _check("ExpandDims", {"X": _draw(2, 3), "axis": np.array(1, np.int32)})


def test_bias_dropout_follows_the_network() -> None:
    data, bias, residual = (torch.from_numpy(_draw(*s)) for s in ((40, 50), (50,), (40, 50)))
    stored = {"ratio": np.array(0.25, np.float32), "training_mode": np.array(True)}
    inputs = {"data": data, "bias": bias, "residual": residual}
    net = onward.to_torch(make_model("BiasDropout", inputs, {}, 20, 2, stored, domain=MICROSOFT))
    torch.testing.assert_close(net(*inputs.values())[0], data + bias + residual)
    torch.manual_seed(0)
    result, mask = net.train()(*inputs.values())
    torch.testing.assert_close(result, torch.where(mask, (data + bias) / 0.75, 0) + residual)
    assert abs(mask.float().mean().item() - 0.75) < 0.04


@pytest.mark.parametrize("segments", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("placed", [True, False])
def test_embed_layer_normalization(segments: bool, masked: bool, placed: bool) -> None:
    inputs: dict[str, Any] = {
        "input_ids": RANDOM.integers(0, 9, (2, 4)).astype(np.int32),
        "segment_ids": RANDOM.integers(0, 2, (2, 4)).astype(np.int32) if segments else None,
        "word_embedding": _draw(9, 8),
        "position_embedding": _draw(6, 8),
        "segment_embedding": _draw(2, 8) if segments else None,
        "gamma": _draw(8),
        "beta": _draw(8),
        "mask": np.array([[1, 1, 1, 0], [1, 1, 0, 0]], np.int32) if masked else None,
        "position_ids": np.array([[3, 1, 0, 5], [0, 1, 2, 3]], np.int32) if placed else None,
    }
    tables = ("word_embedding", "position_embedding", "segment_embedding", "gamma", "beta")
    stored = {name: inputs[name] for name in tables if inputs[name] is not None}
    given = [value for name, value in inputs.items() if value is not None and name not in stored]
    model = make_model("EmbedLayerNormalization", inputs, {"epsilon": 1e-5}, 20, 3, stored, domain=MICROSOFT)
    check_against_onnxruntime(model, *given, rtol=1e-4, atol=1e-5)


def test_an_unknown_activation_is_named() -> None:
    inputs = {"A": _draw(2, 3), "B": _draw(3, 4)}
    model = make_model("FusedGemm", inputs, {"activation": "Gaussian"}, 20, domain=MICROSOFT)
    with pytest.raises(NodeError, match="activation is 'Gaussian'; known are Relu"):
        run(model, *inputs.values())
