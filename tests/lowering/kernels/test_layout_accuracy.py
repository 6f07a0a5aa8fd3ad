"""Channels-last images lose no digits that contiguous ones keep, forward and backward, whatever their mean.

Each operator that a convolution's layout can reach, compared with itself in float64, over means far above the
deviation, odd sizes, one image and one channel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor

import onward
from tests.one_node import make_model

SHAPES = ((2, 8, 9, 7), (1, 64, 31, 33), (3, 1, 9, 7), (2, 12, 5, 3), (1, 4, 3, 300))
RATIOS = (0, 10, 1000)
"""Of the mean to the deviation."""

TOLERANCE = 2e-6
"""Of the largest element: what float32 rounding leaves after sums over these sizes in any order."""

Inputs = Mapping[str, Any]


def _numbers(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).standard_normal(shape)


# The inputs after X of shape (N, C, H, W) and mean m.
def _channels(shape: tuple[int, ...], _: float) -> Inputs:
    return {"scale": _numbers(shape[1]), "bias": _numbers(shape[1])}


def _batch(shape: tuple[int, ...], mean: float) -> Inputs:
    spread = np.abs(_numbers(shape[1])) + 0.5
    return {**_channels(shape, mean), "mean": _numbers(shape[1]) + mean, "var": spread}


def _rows(shape: tuple[int, ...], _: float) -> Inputs:
    return {"Scale": _numbers(shape[3]), "B": _numbers(shape[3])}


def _images(shape: tuple[int, ...], _: float) -> Inputs:
    return {"Scale": _numbers(*shape[1:]), "B": _numbers(*shape[1:])}


def _none(_: tuple[int, ...], __: float) -> Inputs:
    return {}


def _kernel(size: int, grouped: bool = False) -> Any:
    def inputs(shape: tuple[int, ...], _: float) -> Inputs:
        many = 2 * shape[1] if grouped else 5
        return {"W": _numbers(many, 1 if grouped else shape[1], size, size), "B": _numbers(many)}

    return inputs


def _kernel_transposed(shape: tuple[int, ...], _: float) -> Inputs:
    return {"W": _numbers(shape[1], 5, 3, 3), "B": _numbers(5)}


def _scales(*scales: float) -> Any:
    return lambda *_: {"roi": None, "scales": np.array((1, 1, *scales), np.float32)}


REDUCTIONS = ("Mean", "Sum", "SumSquare", "L1", "L2", "LogSumExp", "Max", "Prod")
AXES = ((1,), (2, 3), (0, 2, 3), (3,), (0, 1, 2, 3))

CASES: dict[str, tuple[str, Any, dict[str, Any], int]] = {
    "group": ("GroupNormalization", _channels, {"num_groups": "some"}, 21),
    "instance": ("InstanceNormalization", _channels, {}, 21),
    "batch, training": ("BatchNormalization", _batch, {"training_mode": 1}, 15),
    "batch, inference": ("BatchNormalization", _batch, {}, 15),
    "layer, rows": ("LayerNormalization", _rows, {}, 17),
    "layer, images": ("LayerNormalization", _images, {"axis": 1}, 17),
    "local response": ("LRN", _none, {"size": 3}, 13),
    "Lp": ("LpNormalization", _none, {"axis": 1}, 13),
    "mean and variance": ("MeanVarianceNormalization", _none, {}, 13),
    "mean and variance of images": ("MeanVarianceNormalization", _none, {"axes": [2, 3]}, 13),
    "average pool": ("AveragePool", _none, {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}, 19),
    "average pool, uneven": ("AveragePool", _none, {"kernel_shape": [3, 3], "pads": [0, 1, 1, 1]}, 19),
    "average pool, ceiling": ("AveragePool", _none, {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}, 19),
    "max pool": ("MaxPool", _none, {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}, 12),
    "Lp pool": ("LpPool", _none, {"kernel_shape": [2, 2]}, 18),
    "global average pool": ("GlobalAveragePool", _none, {}, 13),
    "global max pool": ("GlobalMaxPool", _none, {}, 13),
    "global Lp pool": ("GlobalLpPool", _none, {}, 13),
    "convolution": ("Conv", _kernel(3), {"pads": [1, 1, 1, 1]}, 13),
    "convolution of pixels": ("Conv", _kernel(1), {}, 13),
    "convolution in groups": ("Conv", _kernel(3, grouped=True), {"group": "all"}, 13),
    "transposed convolution": ("ConvTranspose", _kernel_transposed, {}, 13),
    "resize, linear": ("Resize", _scales(2, 2), {"mode": "linear"}, 13),
    "resize, cubic": ("Resize", _scales(1.5, 1.7), {"mode": "cubic"}, 13),
    "resize, nearest": ("Resize", _scales(2, 2), {"mode": "nearest"}, 13),
    "softmax over channels": ("Softmax", _none, {"axis": 1}, 13),
    "log softmax over channels": ("LogSoftmax", _none, {"axis": 1}, 13),
    "slopes": ("PRelu", lambda shape, _: {"slope": _numbers(shape[1], 1, 1)}, {}, 13),
    "sums of rows": ("CumSum", lambda *_: {"axis": np.array(3)}, {}, 13),
    "matmul": ("MatMul", lambda shape, _: {"B": _numbers(shape[3], 4)}, {}, 13),
    **{f"Reduce{kind} {axes}": (f"Reduce{kind}", _none, {"axes": axes}, 11) for kind in REDUCTIONS for axes in AXES},
}


@pytest.mark.parametrize("case", CASES)
def test_no_digit_is_lost_to_the_layout(case: str) -> None:
    op_type, others, attributes, opset = CASES[case]
    for shape, ratio in _inputs(op_type):
        attributes = {name: _of_channels(value, shape[1]) for name, value in CASES[case][2].items()}
        X = (np.random.default_rng(0).standard_normal(shape) + ratio).astype(np.float32)
        given = {"X": X, **{name: _rounded(value) for name, value in others(shape, ratio).items()}}
        exact = _results(op_type, {name: _wide(value) for name, value in given.items()}, attributes, opset, False)
        plain, last = (_results(op_type, given, attributes, opset, is_last) for is_last in (False, True))
        for name, expected in exact.items():
            scale = expected.abs().max().clamp(min=1e-30)
            error, error_last = (((found[name] - expected).abs().max() / scale).item() for found in (plain, last))
            assert error_last <= 4 * error + TOLERANCE, f"{name} of {shape}, ratio {ratio}: contiguous {error:.1e}"


def _inputs(op_type: str) -> Iterator[tuple[tuple[int, ...], float]]:
    for shape in SHAPES:
        for ratio in RATIOS:
            if op_type != "ReduceProd" or (ratio == 0 and max(shape) < 10):  # else it leaves the range of float32
                yield shape, ratio


def _of_channels(value: Any, channels: int) -> Any:
    return (
        {"some": max(d for d in (1, 2, 3, 4) if channels % d == 0), "all": channels}.get(value, value)
        if isinstance(value, str)
        else value
    )


def _rounded(value: Any) -> Any:
    return value.astype(np.float32) if value is not None and value.dtype == np.float64 else value


def _wide(value: Any) -> Any:
    return value.astype(np.float64) if value is not None and value.dtype == np.float32 else value


def _results(
    op_type: str, inputs: Inputs, attributes: Mapping[str, Any], opset: int, is_last: bool
) -> dict[str, Tensor]:
    """The output, and the gradient of every input that the standard has one of, in float64."""
    if op_type == "Resize":
        inputs = {**inputs, "scales": _rounded(inputs["scales"])}
    model: onnx.ModelProto = make_model(op_type, inputs, attributes, opset)
    net = onward.to_torch(model).train()
    tensors = {name: torch.from_numpy(value) for name, value in inputs.items() if value is not None}
    if is_last:
        tensors["X"] = tensors["X"].contiguous(memory_format=torch.channels_last)
    fixed = ("mean", "var", "scales")
    leaves = {n: t.requires_grad_() for n, t in tensors.items() if t.is_floating_point() and n not in fixed}
    Y = net(*tensors.values())
    towards = torch.from_numpy(np.random.default_rng(2).standard_normal(tuple(Y.shape)).astype(np.float32)).to(Y.dtype)
    if is_last and Y.dim() == 4:
        towards = towards.contiguous(memory_format=torch.channels_last)
    Y.backward(towards)
    gradients = {f"gradient of {name}": leaf.grad.double() for name, leaf in leaves.items() if leaf.grad is not None}
    return {"output": Y.detach().double(), **gradients}
