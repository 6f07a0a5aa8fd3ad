"""Picking by position: against onnxruntime at every version, with negative positions; gradients with repeated ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import onward
from onward.errors import NodeError
from onward.lowering.ops.indexing import gather, gather_elements
from onward.lowering.simplification import simpler_arguments
from tests.one_node import check_against_onnxruntime, check_gradients, make_model, run, to_array

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((3, 4, 2))

CASES: list[tuple[str, np.ndarray, np.ndarray, dict[str, Any], int]] = [
    ("Gather", X, np.int64([2, 0, 2]), {}, 7),
    ("Gather", X, np.int64([[1, 1], [3, 0]]), {"axis": 1}, 11),
    ("Gather", X, np.int64([[-1, -4]]), {"axis": -2}, 13),
    ("Gather", X, np.int64(-1), {"axis": 1}, 13),
    ("Gather", X[..., 0], np.int64([[0, -1], [2, 2]]), {}, 13),
    ("Gather", X[..., 0], np.array([1, -1], np.int32), {}, 13),
    ("GatherElements", X, np.int64(RANDOM.integers(-3, 3, (2, 4, 2))), {}, 11),
    ("GatherElements", X, np.int64(RANDOM.integers(-4, 4, (3, 6, 2))), {"axis": 1}, 13),
    ("GatherElements", X, np.int64(RANDOM.integers(-2, 2, (3, 2, 5))), {"axis": -1}, 13),
    ("GatherND", X, np.int64([[0, 1], [2, -1], [0, 1]]), {}, 11),
    ("GatherND", X, np.int64([[[0, 1, 1]], [[2, -4, 0]]]), {}, 12),
    ("GatherND", X, np.int64([[1], [-1], [1]]), {"batch_dims": 1}, 12),
    ("GatherND", X, np.int64(RANDOM.integers(-2, 2, (3, 4, 3, 1))), {"batch_dims": 2}, 13),
    ("Compress", X, np.array([True, False, True]), {}, 9),
    ("Compress", X, np.array([False, True, True]), {"axis": 1}, 9),
    ("Compress", X, np.array([False, True]), {"axis": -1}, 11),
]
EACH = [pytest.param(*case, id=f"{case[0]}-{number}") for number, case in enumerate(CASES)]


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(("op_type", "x", "where", "attributes", "opset"), EACH)
def test_like_onnxruntime(
    op_type: str, x: np.ndarray, where: np.ndarray, attributes: dict[str, Any], opset: int, stored: bool
) -> None:
    single = x.astype(np.float32)
    inputs = {"x": single} if stored else {"x": single, "where": where}
    model = make_model(op_type, inputs, attributes, opset, initializers={"where": where} if stored else None)
    check_against_onnxruntime(model, *inputs.values())


@pytest.mark.parametrize(("op_type", "x", "where", "attributes", "opset"), EACH)
def test_gradients(op_type: str, x: np.ndarray, where: np.ndarray, attributes: dict[str, Any], opset: int) -> None:
    check_gradients(make_model(op_type, {"x": x, "where": where}, attributes, opset), x, where)


@pytest.mark.parametrize("dtype", [np.uint8, np.bool_, np.int32, np.uint16, np.uint64, np.float16])
@pytest.mark.parametrize("number", [0, 3, 4, 7, 9])
def test_other_types_are_picked_too(dtype: type[np.generic], number: int) -> None:
    op_type, x, where, attributes, opset = CASES[number]
    data = (np.abs(x) * 9).astype(dtype)
    actual = run(make_model(op_type, {"x": data, "w": where}, attributes, opset), data, where)
    wide = data.astype(np.float64)
    expected = run(make_model(op_type, {"x": wide, "w": where}, attributes, opset), wide, where)
    assert to_array(actual).dtype == data.dtype
    np.testing.assert_array_equal(to_array(actual).astype(np.float64), to_array(expected))


def test_a_single_known_position_is_a_view() -> None:
    """Choosing one token of a sequence moves no memory and asks the device nothing."""
    x = torch.randn(2, 5, 3)
    net = onward.to_torch(make_model("Gather", {"x": x}, {"axis": 1}, 13, initializers={"i": np.array(-1)}))
    result = net(x)
    assert result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert torch.equal(result, x[:, -1])


ONE_HOT: list[tuple[Any, Any, int]] = [
    (np.int64([0, 2, -1, 3, -4]), {}, 9),
    (np.int64([[0, 1], [2, 7]]), {"axis": 0}, 11),
    (np.int64([[0, 1], [2, 7]]), {"axis": -2}, 11),
    (np.array([1.0, 2.0], np.float32), {"axis": 1}, 11),
]


@pytest.mark.parametrize(("positions", "attributes", "opset"), ONE_HOT)
@pytest.mark.parametrize("depth", [np.array(3), np.array([3]), np.array(3.0, np.float32)])
def test_one_hot(positions: np.ndarray, attributes: dict[str, Any], opset: int, depth: np.ndarray) -> None:
    values = np.array([0.5, 2.0], np.float32)
    inputs = {"i": positions, "d": depth, "v": values}
    model = make_model("OneHot", inputs, attributes, opset)
    axis = attributes.get("axis", -1)
    axis = axis + positions.ndim + 1 if axis < 0 else axis
    whole = positions.astype(np.int64)
    wrapped = np.expand_dims(np.where(whole < 0, whole + 3, whole), axis)
    classes = np.arange(3).reshape([-1 if a == axis else 1 for a in range(positions.ndim + 1)])
    np.testing.assert_array_equal(to_array(run(model, *inputs.values())), np.where(wrapped == classes, 2.0, 0.5))
    differentiable = {**inputs, "v": values.astype(np.float64)}
    check_gradients(make_model("OneHot", differentiable, attributes, opset), *differentiable.values())


@pytest.mark.parametrize("x", [np.array([[0, 1.5], [2, 0]], np.float32), np.zeros((2, 2), np.float32)])
def test_non_zero(x: np.ndarray) -> None:
    check_against_onnxruntime(make_model("NonZero", {"x": x}, opset=13), x)


def test_non_zero_of_a_number_has_no_rows() -> None:
    """The standard: (0, N) for a rank-0 input, unlike numpy."""
    x = np.array(3.0, np.float32)
    assert run(make_model("NonZero", {"x": x}, opset=13), x).shape == (0, 1)


def test_bad_values_are_named() -> None:
    with pytest.raises(NodeError, match="axis 5 is out of range for a tensor of rank 3"):
        run(make_model("Gather", {"x": X, "i": np.int64([0])}, {"axis": 5}, 13), X, np.int64([0]))
    with pytest.raises(NodeError, match="coordinates of length 4 after 0 batch axes exceed rank 3"):
        run(make_model("GatherND", {"x": X, "i": np.int64([[0, 0, 0, 0]])}, opset=13), X, np.int64([[0, 0, 0, 0]]))
    with pytest.raises(NodeError, match="first 1 axes of data"):
        run(make_model("GatherND", {"x": X, "i": np.int64([[0]])}, {"batch_dims": 1}, 13), X, np.int64([[0]]))


@pytest.mark.parametrize("coordinates", [[0, 4], [0, -5], [2, 4], [3, 0], [-4, 3]])
@pytest.mark.parametrize("op_type", ["GatherND", "ScatterND"])
def test_a_coordinate_beyond_its_axis_is_refused(op_type: str, coordinates: list[int]) -> None:
    """Also one whose place in memory is that of another element: [0, 4] is not [1, 0]."""
    inputs = {"x": RANDOM.random((3, 4), np.float32), "i": np.int64([coordinates])}
    if op_type == "ScatterND":
        inputs["u"] = np.float32([1.0])
    with pytest.raises(NodeError, match=r"out of (range|bounds)"):
        run(make_model(op_type, inputs, opset=13), *inputs.values())


@pytest.mark.parametrize("index", [0, -1])
def test_gather_of_a_list_by_a_position_that_is_computed(index: int) -> None:
    data, place = np.arange(3, dtype=np.int64) * 5, np.array(index)
    check_against_onnxruntime(make_model("Gather", {"data": data, "indices": place}, {}, 13), data, place)


WINDOWS = [
    ((3, 7), 2, 1, 0), ((3, 7), 1, 2, 0), ((2, 3), 3, 4, 1), ((4, 2), 5, 1, 2), ((2, 2), 1, 1, 14),
]  # fmt: skip
"""(rows, columns), the step from row to row and from column to column, and the first position."""


@pytest.mark.parametrize(("shape", "across", "along", "start"), WINDOWS)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_windows_at_known_positions_are_views(
    shape: tuple[int, int], across: int, along: int, start: int, axis: int
) -> None:
    """As torch's exporter writes `unfold`: what is gathered is a view, and its gradient is that of the elements."""
    positions = start + across * np.arange(shape[0])[:, None] + along * np.arange(shape[1])
    data = np.random.default_rng(0).standard_normal((20, 21, 22)).astype(np.float32)
    changes = simpler_arguments(
        gather,
        ("data", torch.from_numpy(positions)),
        {"axis": axis},
        lambda a: a if isinstance(a, Tensor) else None,
        {},
    )
    assert changes is not None
    x = torch.from_numpy(data).requires_grad_()
    found = gather(x, *changes[0][1:], **changes[1])
    assert found.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    np.testing.assert_array_equal(to_array(found), np.take(data, positions, axis))
    own = torch.from_numpy(data).requires_grad_()
    weight = torch.randn(found.shape)
    (found * weight).sum().backward()
    (gather(own, torch.from_numpy(positions), axis=axis) * weight).sum().backward()
    torch.testing.assert_close(x.grad, own.grad)


@pytest.mark.parametrize(
    "positions", [[[0, 1], [2, 4]], [[0, 0], [1, 1]], [[3, 2], [2, 1]], [[-2, -1], [-1, 0]], [[0, 1]], [0, 1, 2]]
)
def test_other_positions_are_read_one_by_one(positions: list[int] | list[list[int]]) -> None:
    lookup = lambda given: given if isinstance(given, Tensor) else None  # noqa: E731
    assert simpler_arguments(gather, ("data", torch.tensor(positions)), {}, lookup, {}) is None


def test_windows_beyond_the_axis_are_refused() -> None:
    with pytest.raises(IndexError, match="index 8 is out of range for an axis of size 8"):
        gather(torch.zeros(8), (range(0, 3), range(0, 8, 2)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("first", "is_kept"), [(0, True), (-1, False)])
def test_positions_from_the_start_are_not_copied(first: int, is_kept: bool) -> None:
    data, positions = torch.arange(12.0).reshape(3, 4).requires_grad_(), torch.tensor([[first, 2, 1, 0]])
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        found = gather_elements(data, positions)
    assert found.tolist() == [[8.0 if first else 0.0, 9.0, 6.0, 3.0]]
    assert any(tensor.data_ptr() == positions.data_ptr() for tensor in kept) == is_kept
