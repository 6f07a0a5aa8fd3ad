"""Reductions and softmax: every version's meaning against numpy and onnxruntime, gradients by finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from onward.errors import ModelError
from tests.one_node import check_against_onnxruntime, check_gradients, make_model, run, to_array

RANDOM = np.random.default_rng(0)
DATA = RANDOM.uniform(0.2, 2.0, (2, 3, 4))


def _log_sum_exp(x: np.ndarray, axis: Any, keepdims: bool) -> np.ndarray:
    return np.log(np.sum(np.exp(x), axis=axis, keepdims=keepdims))


REDUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "ReduceSum": np.sum,
    "ReduceMean": np.mean,
    "ReduceProd": np.prod,
    "ReduceMax": np.max,
    "ReduceMin": np.min,
    "ReduceL1": lambda x, axis, keepdims: np.sum(np.abs(x), axis=axis, keepdims=keepdims),
    "ReduceL2": lambda x, axis, keepdims: np.sqrt(np.sum(x * x, axis=axis, keepdims=keepdims)),
    "ReduceSumSquare": lambda x, axis, keepdims: np.sum(x * x, axis=axis, keepdims=keepdims),
    "ReduceLogSum": lambda x, axis, keepdims: np.log(np.sum(x, axis=axis, keepdims=keepdims)),
    "ReduceLogSumExp": _log_sum_exp,
}
WITHOUT_REDUCING: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "ReduceL1": np.abs, "ReduceL2": np.abs, "ReduceSumSquare": np.square, "ReduceLogSum": np.log,
}  # fmt: skip


def _model(op_type: str, data: np.ndarray, axes: Any, opset: int, **attributes: int) -> Any:
    """The axes as an attribute or as a constant input, as the version wants them."""
    by_input = opset >= 18 or (op_type == "ReduceSum" and opset >= 13)
    if axes is None:
        return make_model(op_type, {"data": data}, attributes, opset)
    if by_input:
        initializers = {"axes": np.array(axes, np.int64)}
        return make_model(op_type, {"data": data}, attributes, opset, initializers=initializers)
    return make_model(op_type, {"data": data}, {"axes": axes, **attributes}, opset)


@pytest.mark.parametrize("op_type", REDUCTIONS)
@pytest.mark.parametrize("opset", [1, 11, 13, 18, 28])
def test_values_and_gradients(op_type: str, opset: int) -> None:
    for axes, keepdims in (([1], 1), ([0, 2], 0), (None, 1), (None, 0), ([-1], 0)):
        model = _model(op_type, DATA, axes, opset, keepdims=keepdims)
        expected = REDUCTIONS[op_type](DATA, axis=None if axes is None else tuple(axes), keepdims=bool(keepdims))
        np.testing.assert_allclose(run(model, DATA), expected, rtol=1e-12, err_msg=f"{axes} {keepdims}")
        if opset in (11, 28):
            check_gradients(model, DATA)


@pytest.mark.parametrize("op_type", REDUCTIONS)
def test_no_axes(op_type: str) -> None:
    """No axes reduce everything, or, with `noop_with_empty_axes`, nothing: then only the other steps are done."""
    for axes in (None, []):
        reduced = run(_model(op_type, DATA, axes, 18, keepdims=0), DATA)
        np.testing.assert_allclose(reduced, REDUCTIONS[op_type](DATA, axis=None, keepdims=False), rtol=1e-12)
        kept = run(_model(op_type, DATA, axes, 18, noop_with_empty_axes=1), DATA)
        np.testing.assert_allclose(kept, WITHOUT_REDUCING.get(op_type, lambda x: x)(DATA), rtol=1e-12)


OF_NOTHING = {
    "ReduceSum": 0.0, "ReduceProd": 1.0, "ReduceMax": -np.inf, "ReduceMin": np.inf, "ReduceL1": 0.0, "ReduceL2": 0.0,
    "ReduceSumSquare": 0.0, "ReduceLogSum": -np.inf, "ReduceLogSumExp": -np.inf,
}  # fmt: skip


@pytest.mark.parametrize("op_type", OF_NOTHING)
def test_reducing_nothing(op_type: str) -> None:
    data = np.zeros((2, 0, 3), np.float32)
    for keepdims in (0, 1):
        result = run(_model(op_type, data, [1], 28, keepdims=keepdims), data)
        shape = (2, 1, 3) if keepdims else (2, 3)
        np.testing.assert_array_equal(result, np.full(shape, OF_NOTHING[op_type], np.float32))


def test_extremes_of_nothing_in_types_without_infinity() -> None:
    for dtype in (np.int8, np.uint8, np.int32, np.uint64):
        data, info = np.zeros((2, 0), dtype), np.iinfo(dtype)
        assert to_array(run(_model("ReduceMax", data, [1], 20), data)).tolist() == [[info.min]] * 2
        assert to_array(run(_model("ReduceMin", data, [1], 20), data)).tolist() == [[info.max]] * 2
    flags = np.zeros((0, 2), bool)
    assert run(_model("ReduceMax", flags, [0], 20), flags).tolist() == [[False, False]]
    assert run(_model("ReduceMin", flags, [0], 20), flags).tolist() == [[True, True]]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint64], ids=lambda d: d.__name__)
def test_integers(dtype: type) -> None:
    data = np.array([[3, 1, 4], [2, 7, 1]], dtype=dtype)
    expected = {
        "ReduceSum": [8, 10],
        "ReduceProd": [12, 14],
        "ReduceMax": [4, 7],
        "ReduceMin": [1, 1],
        "ReduceSumSquare": [26, 54],
        "ReduceL1": [8, 10],
        "ReduceMean": [2, 3],
        "ReduceL2": [5, 7],
    }
    for op_type, values in expected.items():
        result = to_array(run(_model(op_type, data, [1], 18, keepdims=0), data))
        assert result.dtype == dtype, op_type
        assert result.tolist() == values, op_type
    large = np.array([2**64 - 1, 2**63, 5], np.uint64)
    assert to_array(run(_model("ReduceMax", large, None, 20, keepdims=0), large)) == 2**64 - 1
    assert to_array(run(_model("ReduceMin", large, None, 20, keepdims=0), large)) == 5


def test_gradient_of_a_norm_at_zero_is_zero() -> None:
    x = torch.zeros(2, 3, requires_grad=True)
    run(make_model("ReduceL2", {"data": x}, {}, 13), x).sum().backward()
    assert torch.equal(x.grad, torch.zeros(2, 3))


def test_log_sum_exp_does_not_overflow() -> None:
    x = np.array([1000.0, 1000.0, -1000.0], np.float32)
    np.testing.assert_allclose(run(_model("ReduceLogSumExp", x, None, 18, keepdims=0), x), 1000 + np.log(2), rtol=1e-6)
    x = np.full(3, -np.inf, np.float32)
    assert run(_model("ReduceLogSumExp", x, None, 18, keepdims=0), x).item() == -np.inf


def test_gradient_of_a_product_with_zeros() -> None:
    x = DATA.copy()
    x[0, 1, 2] = x[1, 0, 0] = x[1, 2, 3] = 0
    check_gradients(_model("ReduceProd", x, [1, 2], 18), x)


def test_ties_share_the_gradient_of_an_extreme() -> None:
    x = torch.tensor([2.0, 1.0, 2.0], requires_grad=True)
    run(_model("ReduceMax", np.zeros(3, np.float32), None, 18, keepdims=0), x).backward()
    assert x.grad.tolist() == [0.5, 0.0, 0.5]


def test_scalars_and_axes_out_of_range() -> None:
    x = np.float32(3)
    assert run(_model("ReduceSum", x, None, 13), x).item() == 3
    with pytest.raises(ModelError, match="axis 3 is out of range for a tensor of rank 3"):
        run(_model("ReduceSum", DATA, [3], 13), DATA)
    with pytest.raises(ModelError, match="axis -4 is out of range for a tensor of rank 3"):
        run(make_model("ArgMax", {"data": DATA}, {"axis": -4}, 13), DATA)


@pytest.mark.parametrize("op_type", ["ArgMax", "ArgMin"])
def test_positions_of_extremes(op_type: str) -> None:
    x = np.array([[2, 5, 5, 2], [7, 1, 1, 7]], np.float32)
    for opset in (7, 11, 13):
        for keepdims in (0, 1):
            check_against_onnxruntime(make_model(op_type, {"d": x}, {"axis": 1, "keepdims": keepdims}, opset), x)
    check_against_onnxruntime(make_model(op_type, {"d": x}, {}, 13), x)
    check_against_onnxruntime(make_model(op_type, {"d": x}, {"axis": -1, "select_last_index": 1}, 12), x)
    large = np.array([2**63 - 1, 2**63, 1], np.uint64)
    expected = 1 if op_type == "ArgMax" else 2
    assert run(make_model(op_type, {"d": large}, {}, 13), large).tolist() == [expected]


@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax", "Hardmax"])
def test_softmax_before_opset_13_flattens(op_type: str) -> None:
    """Over all axes from `axis` on together; onnxruntime follows the text, onnx's reference implementation does not."""
    x = RANDOM.standard_normal((2, 3, 4)).astype(np.float32)
    for attributes in ({}, {"axis": 0}, {"axis": 1}, {"axis": 2}):
        for opset in (7, 11):
            check_against_onnxruntime(make_model(op_type, {"input": x}, attributes, opset), x)
    check_against_onnxruntime(make_model(op_type, {"input": x}, {"axis": -2}, 11), x)


@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax", "Hardmax"])
def test_softmax_from_opset_13_is_along_one_axis(op_type: str) -> None:
    x = RANDOM.standard_normal((2, 3, 4)).astype(np.float32)
    for attributes in ({}, {"axis": 0}, {"axis": 1}, {"axis": -2}):
        check_against_onnxruntime(make_model(op_type, {"input": x}, attributes, 13), x)


@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax"])
def test_gradients_of_softmax(op_type: str) -> None:
    x = RANDOM.standard_normal((2, 3, 2))
    for axis, opset in ((0, 9), (1, 11), (-1, 11), (1, 13), (-1, 13)):
        check_gradients(make_model(op_type, {"input": x}, {"axis": axis}, opset), x)


def test_hardmax_takes_the_first_of_equals() -> None:
    x = np.array([[1, 3, 3], [2, 2, 2]], np.float32)
    assert run(make_model("Hardmax", {"input": x}, {}, 13), x).tolist() == [[0, 1, 0], [1, 0, 0]]


def test_softmax_of_large_numbers() -> None:
    x = np.array([[0, 1, 2], [10000, 10001, 10002]], np.float32)
    rows = run(make_model("Softmax", {"input": x}, {}, 13), x)
    torch.testing.assert_close(rows[0], rows[1])
