"""Writing by position: against onnxruntime and a loop by hand, repeated positions included; gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onward.errors import NodeError
from tests.one_node import check_against_onnxruntime, check_gradients, make_model, run, to_array

RANDOM = np.random.default_rng(0)
REDUCTIONS = {"none": lambda a, b: b, "add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
X = RANDOM.uniform(0.5, 2.0, (3, 4, 2))

DISTINCT = np.int64([[[0, 1], [2, 0], [-1, 1], [1, 2]]])
REPEATED = np.int64([[[0, 1], [2, 0], [-1, 1], [1, 2]], [[0, 1], [2, 0], [2, 1], [1, -1]]])


@pytest.mark.parametrize(("op_type", "opset"), [("Scatter", 9), ("ScatterElements", 11), ("ScatterElements", 16)])
def test_scatter_elements_like_onnxruntime(op_type: str, opset: int) -> None:
    x, updates = X.astype(np.float32), RANDOM.standard_normal(DISTINCT.shape).astype(np.float32)
    for axis in (0, -3):
        attributes = {"axis": axis}
        model = make_model(op_type, {"x": x, "i": DISTINCT, "u": updates}, attributes, opset)
        check_against_onnxruntime(model, x, DISTINCT, updates)


def by_hand_elements(x: np.ndarray, where: np.ndarray, updates: np.ndarray, axis: int, reduction: str) -> np.ndarray:
    result = x.copy()
    for place in np.ndindex(*where.shape):
        target = list(place)
        target[axis] = where[place]
        old = result[tuple(target)]
        result[tuple(target)] = REDUCTIONS[reduction](old, updates[place])
    return result


@pytest.mark.parametrize("reduction", ["add", "mul", "max", "min"])
@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.uint8, np.uint16])
def test_scatter_elements_reduces_repeated_positions(reduction: str, dtype: type[np.generic]) -> None:
    x, updates = (X * 3).astype(dtype), (RANDOM.uniform(0.5, 3.0, REPEATED.shape)).astype(dtype)
    model = make_model("ScatterElements", {"x": x, "i": REPEATED, "u": updates}, {"reduction": reduction}, 18)
    actual = to_array(run(model, x, REPEATED, updates))
    assert actual.dtype == x.dtype
    np.testing.assert_allclose(actual, by_hand_elements(x, REPEATED, updates, 0, reduction), rtol=1e-12)


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
def test_scatter_elements_gradients(reduction: str) -> None:
    where = DISTINCT if reduction == "none" else REPEATED
    updates = RANDOM.uniform(0.5, 2.0, where.shape)
    attributes = {} if reduction == "none" else {"reduction": reduction}
    check_gradients(
        make_model("ScatterElements", {"x": X, "i": where, "u": updates}, attributes, 18), X, where, updates
    )


POINTS = {
    "slices": (np.int64([[2], [0]]), (2, 4, 2)),
    "elements": (np.int64([[0, 1, 1], [2, -1, 0], [1, 0, 0]]), (3,)),
    "grid": (np.int64([[[0, 0], [1, 3]], [[-1, 1], [2, 2]]]), (2, 2, 2)),
    "repeated slices": (np.int64([[1], [0], [-2]]), (3, 4, 2)),
    "repeated elements": (np.int64([[0, 1, 1], [0, -3, -1], [1, 0, 0]]), (3,)),
}


def by_hand_points(x: np.ndarray, where: np.ndarray, updates: np.ndarray, reduction: str) -> np.ndarray:
    result = x.copy()
    for place in np.ndindex(*where.shape[:-1]):
        target = tuple(where[place])
        result[target] = REDUCTIONS[reduction](result[target], updates[place])
    return result


@pytest.mark.parametrize("name", list(POINTS))
@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
def test_scatter_nd(name: str, reduction: str) -> None:
    if reduction == "none" and name.startswith("repeated"):
        pytest.skip("the standard leaves the order of repeated writes open")
    where, shape = POINTS[name]
    for dtype in (np.float64, np.int64, np.uint32):
        x, updates = (X * 3).astype(dtype), RANDOM.uniform(1.0, 3.0, shape).astype(dtype)
        attributes = {} if reduction == "none" else {"reduction": reduction}
        model = make_model("ScatterND", {"x": x, "i": where, "u": updates}, attributes, 18)
        actual = to_array(run(model, x, where, updates))
        assert actual.dtype == x.dtype
        np.testing.assert_allclose(actual, by_hand_points(x, where, updates, reduction), rtol=1e-12)
    check_gradients(model_of(X, where, shape, attributes), X, where, RANDOM.uniform(0.5, 2.0, shape))


def model_of(x: np.ndarray, where: np.ndarray, shape: tuple[int, ...], attributes: dict[str, Any]) -> Any:
    return make_model("ScatterND", {"x": x, "i": where, "u": np.zeros(shape)}, attributes, 18)


@pytest.mark.parametrize("mode", ["linear", "circular"])
@pytest.mark.parametrize("written", [None, [0, 2]])
def test_tensor_scatter(mode: str, written: list[int] | None) -> None:
    past, update = RANDOM.standard_normal((2, 3, 4, 2)), RANDOM.standard_normal((2, 3, 2, 2))
    starts = [0, 0] if written is None else ([1, 3] if mode == "circular" else written)
    expected = past.copy()
    for sample in range(2):
        for step in range(2):
            expected[sample, :, (starts[sample] + step) % 4] = update[sample, :, step]
    inputs = {"p": past, "u": update, "w": None if written is None else np.int64(starts)}
    given = [value for value in inputs.values() if value is not None]
    model = make_model("TensorScatter", inputs, {"mode": mode}, 24)
    np.testing.assert_array_equal(to_array(run(model, *given)), expected)
    check_gradients(model, *given)


def test_bad_values_are_named() -> None:
    where, updates = np.int64([[0, 0, 0, 0]]), np.ones(1)
    with pytest.raises(NodeError, match="coordinates of length 4 exceed the rank"):
        run(make_model("ScatterND", {"x": X, "i": where, "u": updates}, opset=18), X, where, updates)
    small = np.ones((1, 1, 1))
    model = make_model("ScatterElements", {"x": X, "i": np.int64(small), "u": small}, {"reduction": "mean"}, 18)
    with pytest.raises(NodeError, match="reduction 'mean' is not known"):
        run(model, X, np.int64(small), small)
