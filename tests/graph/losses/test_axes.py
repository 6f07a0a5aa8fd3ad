"""The axes of values followed backwards through what only moves elements, and softmax over one of them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onward.graph.losses.axes import AxisTracker


def tracked(
    body: str, opset: int = 18, shape: str = "2, 3, 4", **tensors: object
) -> tuple[AxisTracker, dict[str, ir.Node]]:
    text = f'<ir_version: 8, opset_import: ["": {opset}]> g (float[{shape}] x) => (y) {{ {body} }}'
    proto = onnx.parser.parse_model(text)
    for name, given in tensors.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(given), name))
    model = ir.from_proto(proto)
    return AxisTracker(model), {str(node.outputs[0].name): node for node in model.graph}


@pytest.mark.parametrize(
    ("body", "axis", "before"),
    [
        ("y = Identity(x)", 2, 2),
        ("y = Transpose<perm = [2, 0, 1]>(x)", 0, 2),
        ("y = Transpose(x)", 0, 2),
        ("y = Reshape(x, flat)", 1, 2),
        ("y = Reshape(x, flat)", 0, None),
        ("y = Flatten<axis = 2>(x)", 1, 2),
        ("y = Concat<axis = 0>(x, x)", 1, 1),
        ("y = Concat<axis = 0>(x, x)", 0, None),
        ("y = Gather<axis = 1>(x, one)", 1, 2),
        ("y = Gather<axis = 1>(x, two)", 1, None),
        ("y = Gather<axis = 1>(x, two)", 2, 2),
        ("y = ReduceMean<keepdims = 0>(x, axes)", 1, 2),
        ("y = ReduceMean(x, axes)", 1, None),
        ("y = Relu(x)", 1, None),
    ],
)
def test_where_elements_come_from(body: str, axis: int, before: int | None) -> None:
    tracker, nodes = tracked(body, flat=np.array([-1, 4]), one=np.array(0), two=np.array([0, 1]), axes=np.array([1]))
    assert tracker.before(nodes["y"], axis) == before


@pytest.mark.parametrize(
    ("body", "opset", "shape", "axis", "expected"),
    [
        ("y = Softmax(x)", 13, "2, 3, 4", 2, True),
        ("y = Softmax(x)", 13, "2, 3, 4", 1, False),
        ("y = Softmax<axis = 1>(x)", 13, "2, 3, 4", -2, True),
        ("y = Softmax(x)", 11, "2, 3, 4", 1, False),
        ("y = Softmax(x)", 11, "2, 3, 1", 1, True),
        ("y = Softmax<axis = 2>(x)", 11, "2, 3, 4", 2, True),
    ],
)
def test_the_axis_of_a_softmax(body: str, opset: int, shape: str, axis: int, expected: bool) -> None:
    tracker, nodes = tracked(body, opset, shape)
    assert tracker.is_softmax_over(nodes["y"], axis) is expected
    assert tracker.is_softmax_over(nodes["y"], None)


@pytest.mark.parametrize(
    ("body", "axis", "expected"),
    [
        ("s = ReduceSum(x, last) y = Div(x, s)", 2, True),
        ("s = ReduceSum(x, last) y = Div(x, s)", 1, False),
        ("s = ReduceSum<keepdims = 0>(x, last) u = Unsqueeze(s, last) y = Div(x, u)", 2, True),
        ("s = ReduceSum<keepdims = 0>(x, last) y = Div(x, s)", 2, False),
        ("s = ReduceSum(x) y = Div(x, s)", 2, False),
        ("e = Exp(x) s = ReduceSum(e, last) y = Div(x, s)", 2, False),
        ("m = ReduceMax(x, last) y = Div(x, m)", 2, False),
    ],
)
def test_division_by_its_own_sum(body: str, axis: int, expected: bool) -> None:
    tracker, nodes = tracked(body, shape="4, 4, 4", last=np.array([2]))
    assert tracker.divides_by_sum(nodes["y"], axis) is expected


def test_numbers_reciprocals_and_bounds() -> None:
    body = "a = Reciprocal(x) b = Div(one, a) c = Clip(b, zero, one) d = Clip(c, zero, two) y = Add(c, d)"
    tracker, nodes = tracked(body, one=np.float32(1), zero=np.float32(0), two=np.float32(2))
    assert tracker.producer_of_reciprocal(nodes["b"]) is nodes["a"]
    assert tracker.producer_of_reciprocal(nodes["a"]) is None
    assert tracker.clips_to_unit_interval(nodes["c"])
    assert not tracker.clips_to_unit_interval(nodes["d"])
    assert [left.name for left, _ in tracker.summands(nodes["y"])] == ["c", "d"]
    assert tracker.shape(None) is None
