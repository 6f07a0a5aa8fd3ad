"""Comparisons, logic, Where, IsNaN and IsInf against numpy; gradients of Where by finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onward.errors import ModelError
from tests.one_node import check_gradients, make_model, run, to_array

COMPARISONS = [
    ("Equal", np.equal, 7),
    ("Equal", np.equal, 19),
    ("Greater", np.greater, 9),
    ("GreaterOrEqual", np.greater_equal, 16),
    ("Less", np.less, 7),
    ("LessOrEqual", np.less_equal, 12),
]


@pytest.mark.parametrize(("op_type", "function", "opset"), COMPARISONS)
def test_comparisons_broadcast_and_know_nan(op_type: str, function: np.ufunc, opset: int) -> None:
    a = np.array([[1.0, 2.0, np.nan], [3.0, -0.0, np.inf]], np.float32)
    b = np.array([1.0, 0.0, np.inf], np.float32)
    np.testing.assert_array_equal(run(make_model(op_type, {"A": a, "B": b}, {}, opset), a, b), function(a, b))


@pytest.mark.parametrize(
    ("op_type", "function"), [("And", np.logical_and), ("Or", np.logical_or), ("Xor", np.logical_xor)]
)
def test_logic(op_type: str, function: np.ufunc) -> None:
    a, b = np.array([[True, False]]), np.array([[True], [False]])
    np.testing.assert_array_equal(run(make_model(op_type, {"A": a, "B": b}, {}, 7), a, b), function(a, b))
    old = make_model(op_type, {"A": a, "B": np.array([True])}, {"broadcast": 1}, 1)
    np.testing.assert_array_equal(run(old, a, np.array([True])), function(a, True))


def test_not() -> None:
    x = np.array([True, False])
    assert run(make_model("Not", {"X": x}, {}, 1), x).tolist() == [False, True]


def test_comparisons_before_opset_7_align_at_an_axis() -> None:
    a, b = np.arange(6.0, dtype=np.float32).reshape(2, 3, 1), np.array([0, 4], np.float32)
    for op_type, function in (("Greater", np.greater), ("Less", np.less)):
        result = run(make_model(op_type, {"A": a, "B": b}, {"broadcast": 1, "axis": 0}, 1), a, b)
        np.testing.assert_array_equal(result, function(a, b.reshape(2, 1, 1)))
    integers = a.astype(np.int64), b.astype(np.int64)
    result = run(
        make_model("Equal", {"A": a.astype(np.int64), "B": integers[1]}, {"broadcast": 1, "axis": 0}, 1), *integers
    )
    np.testing.assert_array_equal(result, a == b.reshape(2, 1, 1))


def test_an_axis_that_does_not_fit_is_named() -> None:
    a, b = np.ones((2, 3), np.float32), np.ones((3,), np.float32)
    with pytest.raises(ModelError, match=r"B \[3\] placed at axis 2 does not fit into A \[2, 3\]"):
        run(make_model("Less", {"A": a, "B": b}, {"broadcast": 1, "axis": 2}, 1), a, b)


def test_where_broadcasts_three_ways_and_sends_gradients_to_the_chosen() -> None:
    random = np.random.default_rng(0)
    condition = np.array([[True], [False]])
    x, y = random.standard_normal((1, 3)), random.standard_normal((4, 1, 1))
    model = make_model("Where", {"condition": condition, "X": x, "Y": y}, {}, 16)
    np.testing.assert_array_equal(run(model, condition, x, y), np.where(condition, x, y))
    check_gradients(model, condition, x, y)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_where_chooses_between_unsigned_integers(dtype: type[np.unsignedinteger]) -> None:
    condition, x, y = np.array([[True], [False]]), np.array([np.iinfo(dtype).max], dtype), np.array([1], dtype)
    model = make_model("Where", {"condition": condition, "X": x, "Y": y}, {}, 16)
    chosen = to_array(run(model, condition, x, y))
    assert chosen.dtype == dtype
    assert chosen.tolist() == [[np.iinfo(dtype).max], [1]]


def test_where_keeps_nan_of_the_other_branch_out_of_the_result() -> None:
    condition, x, y = np.array([True, False]), np.array([1.0, np.nan]), np.array([np.nan, 2.0])
    assert run(make_model("Where", {"c": condition, "X": x, "Y": y}, {}, 9), condition, x, y).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2])
def test_is_nan_and_is_inf(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, float("nan"), float("inf"), float("-inf")]).to(dtype)
    assert run(make_model("IsNaN", {"X": x}, {}, 20), x).tolist() == [False, True, False, False]
    for negative, positive in ((1, 1), (1, 0), (0, 1), (0, 0)):
        attributes = {"detect_negative": negative, "detect_positive": positive}
        expected = [False, False, bool(positive), bool(negative)]
        assert run(make_model("IsInf", {"X": x}, attributes, 20), x).tolist() == expected
