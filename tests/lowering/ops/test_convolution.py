"""Convolutions equal onnxruntime's over attributes and ranks; gradients by finite differences in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from onward.errors import NodeError
from tests.one_node import check_against_onnxruntime, check_gradients, make_model, normal, run

RANDOM = np.random.default_rng(0)
_draw = normal(RANDOM)


CONV = [
    ((2, 3, 9), (4, 3, 3), {}),
    ((2, 3, 9), (4, 3, 3), {"pads": [2, 0], "strides": [2]}),
    ((2, 4, 9, 8), (6, 2, 3, 2), {"group": 2, "pads": [1, 1, 1, 1]}),
    ((2, 4, 9, 8), (6, 2, 3, 2), {"group": 2, "pads": [0, 1, 2, 0], "strides": [2, 3], "dilations": [2, 1]}),
    ((1, 4, 7, 8), (4, 1, 3, 3), {"group": 4, "auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ((1, 4, 7, 8), (4, 1, 4, 2), {"group": 4, "auto_pad": "SAME_LOWER", "strides": [2, 1]}),
    ((1, 2, 7, 8), (3, 2, 3, 3), {"auto_pad": "SAME_UPPER", "strides": [4, 4]}),
    ((1, 2, 7, 8), (3, 2, 1, 1), {"auto_pad": "SAME_UPPER", "strides": [3, 3]}),
    ((1, 2, 7, 8), (3, 2, 3, 3), {"auto_pad": "VALID", "strides": [2, 2], "kernel_shape": [3, 3]}),
    ((1, 2, 5, 6, 7), (3, 2, 2, 3, 2), {"pads": [1, 0, 1, 0, 1, 0], "strides": [1, 2, 1]}),
    ((1, 2, 5, 6, 7), (3, 2, 2, 3, 2), {"auto_pad": "SAME_LOWER", "dilations": [1, 1, 1]}),
]


@pytest.mark.parametrize("opset", [7, 11, 22])
@pytest.mark.parametrize(("shape", "kernel", "attributes"), CONV)
def test_conv_equals_onnxruntime(
    shape: tuple[int, ...], kernel: tuple[int, ...], attributes: dict[str, Any], opset: int
) -> None:
    X, W, B = _draw(*shape), _draw(*kernel), _draw(kernel[0])
    check_against_onnxruntime(make_model("Conv", {"X": X, "W": W, "B": B}, attributes, opset), X, W, B, atol=1e-5)
    check_against_onnxruntime(make_model("Conv", {"X": X, "W": W}, attributes, opset), X, W, atol=1e-5)


@pytest.mark.parametrize(("shape", "kernel", "attributes"), [CONV[1], CONV[3], CONV[4], CONV[5], CONV[9]])
def test_conv_gradients(shape: tuple[int, ...], kernel: tuple[int, ...], attributes: dict[str, Any]) -> None:
    X, W, B = _draw(*shape, dtype=float), _draw(*kernel, dtype=float), _draw(kernel[0], dtype=float)
    check_gradients(make_model("Conv", {"X": X, "W": W, "B": B}, attributes, 22), X, W, B)


def test_conv_over_four_spatial_axes_is_the_sum_over_its_windows() -> None:
    X, W, B = (torch.randn(s, dtype=torch.float64) for s in ((2, 4, 4, 5, 4, 3), (6, 2, 2, 3, 2, 2), (6,)))
    attributes = {"group": 2, "strides": [1, 2, 1, 1], "dilations": [2, 1, 1, 1], "pads": [1, 0, 0, 1, 0, 1, 0, 0]}
    model = make_model("Conv", {"X": X, "W": W, "B": B}, attributes, 22)
    padded = torch.nn.functional.pad(X, (1, 0, 0, 0, 0, 1, 1, 0))
    windows = padded.unfold(2, 3, 1)[..., ::2].unfold(3, 3, 2).unfold(4, 2, 1).unfold(5, 2, 1)
    windows = windows.reshape(2, 2, 2, *windows.shape[2:])
    expected = torch.einsum("ngcabdeijkl,gocijkl->ngoabde", windows, W.reshape(2, 3, 2, 2, 3, 2, 2))
    expected = expected.flatten(1, 2) + B.reshape(-1, 1, 1, 1, 1)
    torch.testing.assert_close(run(model, X, W, B), expected)


TRANSPOSED = [
    ((2, 3, 5), (3, 4, 3), {"strides": [2], "pads": [1, 0]}),
    ((2, 4, 5, 4), (4, 3, 3, 2), {"group": 2, "strides": [2, 3], "pads": [1, 1, 1, 1]}),
    ((1, 2, 5, 4), (2, 3, 3, 3), {"strides": [2, 2], "output_padding": [1, 1], "pads": [1, 1, 1, 1]}),
    ((1, 2, 5, 4), (2, 3, 3, 3), {"strides": [2, 2], "output_shape": [11, 8]}),
    ((1, 2, 5, 4), (2, 3, 3, 3), {"strides": [2, 2], "output_shape": [10, 8], "auto_pad": "SAME_UPPER"}),
    ((1, 2, 5, 4), (2, 3, 3, 3), {"strides": [2, 2], "output_shape": [10, 8], "auto_pad": "SAME_LOWER"}),
    ((1, 2, 5, 4), (2, 3, 4, 3), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ((1, 2, 5, 4), (2, 3, 3, 4), {"strides": [2, 3], "auto_pad": "SAME_LOWER"}),
    ((1, 2, 5, 4), (2, 3, 3, 3), {"strides": [2, 1], "auto_pad": "VALID"}),
    ((1, 2, 5, 4), (2, 3, 3, 3), {"dilations": [2, 2], "pads": [0, 2, 1, 0]}),
    ((1, 2, 3, 4, 3), (2, 3, 2, 3, 2), {"strides": [2, 1, 2], "pads": [0, 1, 0, 1, 0, 0]}),
    # Results side by side.
    ((2, 3, 5), (3, 4, 2), {"strides": [2]}),
    ((2, 3, 4, 3), (3, 2, 2, 3), {"strides": [2, 3]}),
    ((1, 2, 2, 3, 2), (2, 3, 2, 1, 2), {"strides": [2, 1, 2]}),
]


@pytest.mark.parametrize("opset", [7, 11, 22])
@pytest.mark.parametrize(("shape", "kernel", "attributes"), TRANSPOSED)
def test_conv_transpose_equals_onnxruntime(
    shape: tuple[int, ...], kernel: tuple[int, ...], attributes: dict[str, Any], opset: int
) -> None:
    X, W = _draw(*shape), _draw(*kernel)
    B = _draw(kernel[1] * attributes.get("group", 1))
    model = make_model("ConvTranspose", {"X": X, "W": W, "B": B}, attributes, opset)
    check_against_onnxruntime(model, X, W, B, atol=1e-5)


@pytest.mark.parametrize(("shape", "kernel", "attributes"), [TRANSPOSED[i] for i in (0, 1, 2, 3, 9, 11, 12, 13)])
def test_conv_transpose_gradients(shape: tuple[int, ...], kernel: tuple[int, ...], attributes: dict[str, Any]) -> None:
    X, W = _draw(*shape, dtype=float), _draw(*kernel, dtype=float)
    B = _draw(kernel[1] * attributes.get("group", 1), dtype=float)
    check_gradients(make_model("ConvTranspose", {"X": X, "W": W, "B": B}, attributes, 22), X, W, B)


FOUR_AXES = [
    ((1, 4, 3, 2, 2, 1), (4, 2, 2, 2, 3, 1), {"group": 2, "strides": [2, 1, 3, 1]}),
    ((2, 2, 3, 2, 3, 2), (2, 3, 2, 3, 2, 2), {"strides": [2, 1, 2, 1], "pads": [1, 0, 1, 1, 0, 1, 1, 0]}),
    ((2, 2, 3, 2, 3, 2), (2, 3, 2, 1, 2, 3), {"strides": [2, 1, 2, 3]}),
    (
        (1, 1, 2, 1, 2, 2),
        (1, 2, 2, 2, 1, 2),
        {"dilations": [3, 1, 2, 1], "strides": [2] * 4, "output_padding": [1] * 4},
    ),
]


@pytest.mark.parametrize(("shape", "kernel", "attributes"), FOUR_AXES)
def test_conv_transpose_over_four_spatial_axes_equals_the_reference_and_has_gradients(
    shape: tuple[int, ...], kernel: tuple[int, ...], attributes: dict[str, Any]
) -> None:
    X, W = _draw(*shape), _draw(*kernel)
    B = _draw(kernel[1] * attributes.get("group", 1))
    model = make_model("ConvTranspose", {"X": X, "W": W, "B": B}, attributes, 22)
    # The reference evaluator's groups take one channel each: one product whose kernel is zero between groups.
    groups, (C, M) = attributes.get("group", 1), kernel[:2]
    whole = np.zeros((C, groups * M, *kernel[2:]), np.float32)
    for g in range(groups):
        of_group = slice(g * C // groups, (g + 1) * C // groups)
        whole[of_group, g * M : (g + 1) * M] = W[of_group]
    ungrouped = make_model("ConvTranspose", {"X": X, "W": whole, "B": B}, {**attributes, "group": 1}, 22)
    expected = ReferenceEvaluator(ungrouped).run(None, {"X": X, "W": whole, "B": B})[0]
    np.testing.assert_allclose(run(model, X, W, B).numpy(), expected, rtol=1e-4, atol=1e-5)
    doubled = [array.astype(float) for array in (X, W, B)]
    check_gradients(make_model("ConvTranspose", dict(zip("XWB", doubled, strict=True)), attributes, 22), *doubled)


def _deformable(attributes: dict[str, Any], kernel: tuple[int, ...], channels: int, offset_groups: int) -> list[Any]:
    X, W, B = _draw(1, channels, 4, 5), _draw(4, channels // attributes.get("group", 1), *kernel), _draw(4)
    plain = make_model("Conv", {"X": X, "W": W}, {k: v for k, v in attributes.items() if k != "offset_group"}, 22)
    sizes = run(plain, X, W).shape[2:]
    offset = _draw(1, offset_groups * int(np.prod(kernel)) * 2, *sizes)
    mask = RANDOM.random((1, offset_groups * int(np.prod(kernel)), *sizes)).astype(np.float32)
    return [X, W, offset, B, mask]


@pytest.mark.parametrize(
    ("kernel", "attributes"),
    [
        ((3, 3), {"pads": [1, 1, 1, 1]}),
        ((2, 3), {"group": 2, "offset_group": 2, "pads": [1, 0, 1, 1]}),
        ((3, 2), {"strides": [2, 1], "dilations": [1, 2], "offset_group": 4, "pads": [1, 1, 1, 1]}),
    ],
)
def test_deform_conv_equals_onnxruntime_and_has_gradients(kernel: tuple[int, ...], attributes: dict[str, Any]) -> None:
    inputs = _deformable(attributes, kernel, 4, attributes.get("offset_group", 1))
    names = ["X", "W", "offset", "B", "mask"]
    model = make_model("DeformConv", dict(zip(names, inputs, strict=True)), attributes, 22)
    check_against_onnxruntime(model, *inputs, atol=1e-4)
    doubled = [array.astype(float) for array in inputs]
    check_gradients(make_model("DeformConv", dict(zip(names, doubled, strict=True)), attributes, 22), *doubled)


def test_deform_conv_without_offsets_is_a_convolution_over_three_axes() -> None:
    X, W = _draw(1, 2, 4, 5, 4), _draw(3, 2, 2, 3, 2)
    offset = np.zeros((1, 12 * 3, 3, 3, 3), np.float32)
    expected = run(make_model("Conv", {"X": X, "W": W}, {}, 22), X, W)
    actual = run(make_model("DeformConv", {"X": X, "W": W, "offset": offset}, {}, 22), X, W, offset)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("op_type", "shape", "kernel", "attributes", "message"),
    [
        ("Conv", (1, 2, 5, 5), (3, 3, 2, 2), {}, "X has 2 channels, but W of shape .* takes 3"),
        ("Conv", (1, 2, 5, 5), (3, 2, 2, 2), {"pads": [1, 1]}, "2 spatial axes need 4 entries"),
        ("Conv", (1, 2, 5, 5), (3, 2, 7, 2), {}, "a kernel of 7 .* is larger than an axis of 5 elements"),
        ("Conv", (1, 2, 5, 5), (3, 2, 2, 2), {"strides": [0, 1]}, "strides is .*at least 1"),
        ("Conv", (1, 2, 5, 5), (3, 2, 2, 2), {"kernel_shape": [3, 3]}, r"kernel_shape is \[3, 3\], but W has"),
        ("Conv", (1, 2, 5, 5), (3, 2, 2, 2), {"auto_pad": "SAME"}, "auto_pad is 'SAME'; expected one of"),
        ("ConvTranspose", (1, 2, 5, 5), (3, 2, 2, 2), {}, "X has 2 channels, but W of shape .* takes 3"),
    ],
)
def test_bad_values_are_named(
    op_type: str, shape: tuple[int, ...], kernel: tuple[int, ...], attributes: dict[str, Any], message: str
) -> None:
    X, W = _draw(*shape), _draw(*kernel)
    with pytest.raises(NodeError, match=message):
        run(make_model(op_type, {"X": X, "W": W}, attributes, 22), X, W)
