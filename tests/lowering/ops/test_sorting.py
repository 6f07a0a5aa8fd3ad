"""TopK and Unique: against numpy's stable order and onnxruntime, ties included; gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from onward import to_torch
from onward.errors import NodeError
from tests.graph.fusion.pairs import parse
from tests.one_node import check_against_onnxruntime, check_gradients, make_model, run, to_array

RANDOM = np.random.default_rng(0)
X = RANDOM.permutation(24).reshape(2, 3, 4).astype(np.float64)
TIES = np.array([[3, 1, 3, 2, 1, 3], [0, 0, 0, 1, 1, 1]], np.float32)


@pytest.mark.parametrize(
    ("opset", "attributes"), [(1, {"k": 2}), (9, {"k": 1, "axis": 1}), (10, {}), (10, {"axis": 0})]
)
def test_old_versions(opset: int, attributes: dict[str, Any]) -> None:
    """k is an attribute up to version 9 and an input from 10 on."""
    k = attributes.get("k", 2)
    axis = attributes.get("axis", -1)
    stored = {} if opset < 10 else {"k": np.array([2])}
    values, indices = run(make_model("TopK", {"x": X}, attributes, opset, 2, stored), X)
    order = np.take(np.argsort(-X, axis, kind="stable"), range(k), axis)
    np.testing.assert_array_equal(to_array(indices), order)
    np.testing.assert_array_equal(to_array(values), np.take_along_axis(X, order, axis))


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("k", [0, 1, 4, 6])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8, np.uint16])
def test_of_equal_values_the_first_wins(largest: int, k: int, dtype: type[np.generic]) -> None:
    x = TIES.astype(dtype)
    model = make_model("TopK", {"x": x}, {"largest": largest}, 11, 2, {"k": np.array([k])})
    values, indices = run(model, x)
    order = np.argsort(-TIES if largest else TIES, 1, kind="stable")[:, :k]
    np.testing.assert_array_equal(to_array(indices), order)
    np.testing.assert_array_equal(to_array(values), np.take_along_axis(x, order, 1))
    assert to_array(values).dtype == x.dtype


@pytest.mark.parametrize("attributes", [{}, {"axis": 1, "largest": 0}, {"axis": 0, "sorted": 0}])
def test_top_k_gradients(attributes: dict[str, Any]) -> None:
    check_gradients(make_model("TopK", {"x": X}, attributes, 11, 2, {"k": np.array([2])}), X)


@pytest.mark.parametrize(("k", "outputs", "is_stable"), [(6, "v", False), (6, "v, i", True), (5, "v", True)])
def test_all_values_alone_are_sorted_as_torch_sorts(
    k: int, outputs: str, is_stable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The places of `torch.sort`, which nobody reads, need no order among equal values."""
    called, sort = [], torch.sort
    monkeypatch.setattr(torch, "sort", lambda *given, stable, **more: called.append(stable) or sort(*given, **more))
    kinds = ", ".join(f"{'float' if name == 'v' else 'int64'}[2,{k}] {name}" for name in outputs.split(", "))
    net = to_torch(parse("float[2,6] x", kinds, "v, i = TopK<axis = 1>(x, k)", {"k": np.array([k])}, 18))
    found = net(torch.from_numpy(TIES))
    values = found[0] if isinstance(found, tuple) else found
    assert called == [is_stable]
    np.testing.assert_array_equal(to_array(values), -np.sort(-TIES, 1)[:, :k])


def test_k_out_of_range() -> None:
    with pytest.raises(NodeError, match="k = 9 is out of range for axis 2 of size 4"):
        run(make_model("TopK", {"x": X}, opset=11, output_count=2, initializers={"k": np.array([9])}), X)


@pytest.mark.parametrize("sorted_", [0, 1])
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_unique_like_onnxruntime(sorted_: int, axis: int | None) -> None:
    x = np.array([[[2, 1], [1, 1], [2, 1]], [[0, 3], [0, 0], [0, 3]], [[2, 1], [1, 1], [2, 1]]], np.float32)
    attributes = {"sorted": sorted_} | ({} if axis is None else {"axis": axis})
    check_against_onnxruntime(make_model("Unique", {"x": x}, attributes, 11, 4), x)
    check_against_onnxruntime(make_model("Unique", {"x": x}, attributes, 11, 1), x)


@pytest.mark.parametrize("axis", [None, 1])
def test_unique_gradients_go_to_the_first_occurrence(axis: int | None) -> None:
    attributes = {} if axis is None else {"axis": axis}
    check_gradients(make_model("Unique", {"x": X}, attributes, 11, 4), X)
