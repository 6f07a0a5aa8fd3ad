"""Moving tensors: each version against onnxruntime or by hand, gradients by finite differences, bad values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from onward.errors import NodeError
from tests.one_node import check_against_onnxruntime, check_gradients, ints, make_model, run, run_onnxruntime, to_array

RANDOM = np.random.default_rng(0)
BIGGEST, SMALLEST = 2**63 - 1, -(2**63)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape)


X = normal(2, 3, 4)

# operator, input, further inputs that are stored, attributes, opsets
CASES: list[tuple[str, np.ndarray, dict[str, np.ndarray], dict[str, Any], tuple[int, ...]]] = [
    ("Reshape", X, {"shape": ints(4, -1)}, {}, (7, 13, 14, 21)),
    ("Reshape", X, {"shape": ints(0, -1)}, {}, (7, 14)),
    ("Reshape", X, {"shape": ints(2, 0, 2, 2)}, {}, (14,)),
    ("Transpose", X, {}, {}, (7, 13, 21)),
    ("Transpose", X, {}, {"perm": [1, 2, 0]}, (7, 13)),
    ("Flatten", X, {}, {}, (7, 9, 11, 13)),
    ("Flatten", X, {}, {"axis": 0}, (9,)),
    ("Flatten", X, {}, {"axis": -1}, (11, 21)),
    ("Flatten", X, {}, {"axis": 3}, (13,)),
    ("Squeeze", X[:, :1], {}, {"axes": [1]}, (7, 11)),
    ("Squeeze", X[:, :1], {}, {"axes": [-2]}, (11,)),
    ("Squeeze", X[:1, :1], {}, {}, (7, 11, 13)),
    ("Squeeze", X[:, :1], {"axes": ints(-2)}, {}, (13, 21)),
    ("Unsqueeze", X, {}, {"axes": [3, 0]}, (7, 11)),
    ("Unsqueeze", X, {"axes": ints(-1, 0)}, {}, (13, 21)),
    ("Expand", X[:, :1], {"shape": ints(5, 1, 3, 1)}, {}, (8, 13)),
    ("Expand", X, {"shape": ints(1)}, {}, (13,)),
    ("Tile", X, {"repeats": ints(2, 1, 3)}, {}, (7, 13)),
    ("Slice", X, {}, {"starts": [1, -3], "ends": [5, -1], "axes": [2, 1]}, (7,)),
    ("Slice", X, {}, {"starts": [0, 1], "ends": [1, 1000]}, (7,)),
    ("Slice", X, {"starts": ints(1, 0), "ends": ints(BIGGEST, -1)}, {}, (10, 11, 13)),
    ("Slice", X, {"starts": ints(-1), "ends": ints(SMALLEST), "axes": ints(2), "steps": ints(-1)}, {}, (10, 13)),
    ("Slice", X, {"starts": ints(3, 9), "ends": ints(0, -9), "axes": ints(-1, 1), "steps": ints(-2, -1)}, {}, (13,)),
    ("Slice", X, {"starts": ints(0), "ends": ints(4), "axes": ints(2), "steps": ints(3)}, {}, (13,)),
    ("DepthToSpace", normal(2, 8, 2, 3), {}, {"blocksize": 2}, (7, 11, 13)),
    ("DepthToSpace", normal(2, 8, 2, 3), {}, {"blocksize": 2, "mode": "CRD"}, (11, 13)),
    ("SpaceToDepth", normal(2, 2, 4, 6), {}, {"blocksize": 2}, (7, 13)),
    ("Identity", X, {}, {}, (7, 13, 21)),
]  # fmt: skip
EACH = [
    pytest.param(op, x, stored, attributes, opset, id=f"{op}-{opset}-{number}")
    for number, (op, x, stored, attributes, opsets) in enumerate(CASES)
    for opset in opsets
]


@pytest.mark.parametrize(("op_type", "x", "stored", "attributes", "opset"), EACH)
def test_like_onnxruntime(
    op_type: str, x: np.ndarray, stored: dict[str, np.ndarray], attributes: dict[str, Any], opset: int
) -> None:
    single = x.astype(np.float32)
    model = make_model(op_type, {"x": single}, attributes, opset, initializers=stored)
    check_against_onnxruntime(model, single)


@pytest.mark.parametrize(("op_type", "x", "stored", "attributes", "opset"), EACH)
def test_gradients(
    op_type: str, x: np.ndarray, stored: dict[str, np.ndarray], attributes: dict[str, Any], opset: int
) -> None:
    check_gradients(make_model(op_type, {"x": x}, attributes, opset, initializers=stored), x)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32, np.bool_, np.float16, np.uint16, np.uint64])
@pytest.mark.parametrize("number", [0, 6, 15, 17, 20])
def test_other_types_move_too(dtype: type[np.generic], number: int) -> None:
    op_type, x, stored, attributes, opsets = CASES[number]
    data = (np.abs(x) * 10).astype(dtype)
    opset = 13 if 13 in opsets else opsets[-1]
    result = to_array(run(make_model(op_type, {"x": data}, attributes, opset, initializers=stored), data))
    wide = data.astype(np.float64)
    expected = to_array(run(make_model(op_type, {"x": wide}, attributes, opset, initializers=stored), wide))
    assert result.dtype == data.dtype
    np.testing.assert_array_equal(result.astype(np.float64), expected)


def test_reshape_of_an_empty_tensor() -> None:
    """A copied 0 cancels out of what -1 stands for; under allowzero a 0 is a size."""
    empty = np.zeros((0, 3, 4), dtype=np.float32)
    assert run(make_model("Reshape", {"x": empty}, opset=14, initializers={"s": ints(0, -1)}), empty).shape == (0, 12)
    allow = make_model("Reshape", {"x": empty}, {"allowzero": 1}, 14, initializers={"s": ints(3, 0)})
    assert run(allow, empty).shape == (3, 0)
    both = make_model("Reshape", {"x": empty}, {"allowzero": 1}, 14, initializers={"s": ints(0, -1)})
    with pytest.raises(NodeError, match="-1 and 0 under allowzero=1"):
        run(both, empty)


def test_reshape_1_takes_its_shape_from_an_attribute() -> None:
    x = torch.arange(6.0)
    assert run(make_model("Reshape", {"x": x}, {"shape": [2, 3]}, 1), x).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("opset", [1, 4, 11, 13])
def test_concat_joins_and_differentiates(opset: int) -> None:
    a, b = normal(2, 3), normal(2, 1)
    model = make_model("Concat", {"a": a, "b": b}, {} if opset == 1 else {"axis": 1}, opset)
    np.testing.assert_array_equal(to_array(run(model, a, b)), np.concatenate([a, b], 1))
    check_gradients(model, a, b)


SPLITS: list[tuple[int, dict[str, np.ndarray], dict[str, Any], list[int]]] = [
    (2, {}, {}, [2, 2, 2]),
    (2, {}, {"split": [1, 2, 3]}, [1, 2, 3]),
    (11, {}, {"split": [1, 5], "axis": -2}, [1, 5]),
    (13, {}, {"axis": 0}, [2, 2, 2]),
    (13, {"split": ints(4, 0, 2)}, {}, [4, 0, 2]),
    (18, {"split": ints(4, 2)}, {}, [4, 2]),
    (18, {}, {"num_outputs": 4}, [2, 2, 2, 0]),
    (18, {}, {"num_outputs": 3}, [2, 2, 2]),
]


@pytest.mark.parametrize(("opset", "stored", "attributes", "sizes"), SPLITS)
def test_split(opset: int, stored: dict[str, np.ndarray], attributes: dict[str, Any], sizes: list[int]) -> None:
    x = normal(6, 2)
    model = make_model("Split", {"x": x}, attributes, opset, len(sizes), stored)
    parts = run(model, x)
    assert [part.shape[0] for part in parts] == sizes
    np.testing.assert_array_equal(to_array(torch.cat(parts)), x)
    check_gradients(model, x, outputs=range(len(sizes)))


def test_split_18_gives_the_rest_to_the_last_part() -> None:
    x = normal(7, 2).astype(np.float32)
    model = make_model("Split", {"x": x}, {"num_outputs": 3}, 18, 3)
    expected = run_onnxruntime(model, x)
    assert [e.shape[0] for e in expected] == [3, 3, 1]
    for left, right in zip(run(model, x), expected, strict=True):
        np.testing.assert_array_equal(to_array(left), right)


@pytest.mark.parametrize(("axes", "opset"), [((1, 0), 10), ((0, 1), 10)])
def test_reverse_sequence(axes: tuple[int, int], opset: int) -> None:
    lengths = ints(1, 3, 2)
    x = normal(3, 4, 2) if axes[0] == 0 else normal(4, 3, 2)
    attributes = {"batch_axis": axes[0], "time_axis": axes[1]}
    single = x.astype(np.float32)
    check_against_onnxruntime(
        make_model("ReverseSequence", {"x": single, "n": lengths}, attributes, opset), single, lengths
    )
    check_gradients(make_model("ReverseSequence", {"x": x, "n": lengths}, attributes, opset), x, lengths)


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_space_to_depth_28_undoes_depth_to_space(mode: str) -> None:
    x = normal(2, 8, 3, 2)
    attributes = {"blocksize": 2, "mode": mode}
    wide = run(make_model("DepthToSpace", {"x": x}, attributes, 28), x)
    back = run(make_model("SpaceToDepth", {"x": to_array(wide)}, attributes, 28), wide)
    np.testing.assert_array_equal(to_array(back), x)


BAD: list[tuple[str, dict[str, np.ndarray], dict[str, Any], int, str]] = [
    ("Reshape", {"s": ints(2, 3, 4, 0)}, {}, 14, "copies axis 3 of an input of rank 3"),
    ("Squeeze", {"a": ints(1)}, {}, 13, "axis 1 has size 3; only axes of size 1"),
    ("Squeeze", {"a": ints(5)}, {}, 13, "axis 5 is out of range for a tensor of rank 3; expected -3 to 2"),
    ("Unsqueeze", {"a": ints(0, -5)}, {}, 13, "name an axis of a rank-5 tensor twice"),
    ("Flatten", {}, {"axis": 4}, 13, "axis 4 is out of range for a tensor of rank 3; expected -3 to 3"),
    ("Slice", {"s": ints(0), "e": ints(2), "a": ints(0), "t": ints(0)}, {}, 13, "step along axis 0 is 0"),
    ("Slice", {"s": ints(0, 0), "e": ints(2)}, {}, 13, "2 starts, 1 ends"),
    ("Tile", {"r": ints(2)}, {}, 13, "1 repeats for a tensor of rank 3"),
    ("Split", {"s": ints(1, 2)}, {"axis": 2}, 13, r"parts \[1, 2\] add up to 3, but axis 2 has size 4"),
]


@pytest.mark.parametrize(("op_type", "stored", "attributes", "opset", "words"), BAD)
def test_bad_values_are_named(
    op_type: str, stored: dict[str, np.ndarray], attributes: dict[str, Any], opset: int, words: str
) -> None:
    model = make_model(op_type, {"x": X}, attributes, opset, 2 if op_type == "Split" else 1, stored)
    with pytest.raises(NodeError, match=words):
        run(model, X)
