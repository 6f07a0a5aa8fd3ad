"""Shape arithmetic moves numbers like onnxruntime moves tensors: rank 0, 1 and 2 exactly, and no tensor is made."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

import onward
from onward.errors import NodeError
from onward.lowering.program import NodeLabel
from tests.lowering.ops.test_control_flow import parse
from tests.one_node import run_onnxruntime, to_array

X = torch.arange(120.0).reshape(2, 3, 4, 5)
CONSTANTS = """
<int64 n0 = {0}, int64 n1 = {1}, int64 last = {-1}, int64[1] v0 = {0}, int64[1] v1 = {1}, int64[1] v2 = {2},
 int64[1] vlast = {-1}, int64[2] pair = {-1, 1}, int64[2, 2] grid = {0, 1, 2, 3}, int64[2] square = {2, 2},
 int64[2] v = {1, 3}, int64[2, 1] points = {0, -1}, int64[0] none = {}, int64[1] huge = {9223372036854775807},
 int64[1] down = {-1}, int64[1] least = {-9223372036854775807}>
"""

STEPS = [
    "y = Identity (s)",
    "y = Gather (s, n1)",
    "y = Gather (s, vlast)",
    "y = Gather (s, grid)",
    "y = Gather (s, last)",
    "m = Reshape (s, square) y = Gather <axis = 1> (m, v0)",
    "m = Reshape (s, square) y = Gather <axis = -1> (m, n1)",
    "a = Gather (s, v0) b = Gather (s, v2) y = Concat <axis = 0> (a, vlast, b)",
    "m = Reshape (s, square) y = Concat <axis = 1> (m, m)",
    "m = Reshape (s, square) y = Concat <axis = -2> (m, m)",
    "y = Slice (s, v1, vlast)",
    "y = Slice (s, vlast, least, v0, down)",
    "y = Slice (s, v0, huge, v0, v2)",
    "m = Reshape (s, square) y = Slice (m, v1, huge, v1)",
    "a = Gather (s, v1) y = Squeeze (a)",
    "a = Gather (s, v1) y = Squeeze (a, v0)",
    "a = Gather (s, n1) y = Unsqueeze (a, v0)",
    "y = Unsqueeze (s, vlast)",
    "y = Unsqueeze (s, pair)",
    "y = Reshape (s, vlast)",
    "y = Reshape (s, square)",
    "a = Gather (s, v1) y = Reshape (a, none)",
    "m = Reshape (s, square) y = Transpose (m)",
    "m = Reshape (s, square) y = Transpose <perm = [0, 1]> (m)",
    "m = Unsqueeze (s, pair) y = Transpose <perm = [1, 2, 0]> (m)",
    "m = Reshape (s, square) y = Flatten <axis = 0> (m)",
    "y, z = Split <num_outputs = 2> (s)",
    "z, y = Split (s, v)",
    "m = Reshape (s, square) z, y = Split <axis = 1, num_outputs = 2> (m)",
    "a = Gather (s, v1) y = Expand (a, v2)",
    "y = Expand (s, v1)",
    "a = Gather (s, v1) y = Tile (a, v2)",
    "y = ScatterElements (s, v1, vlast)",
    "y = ScatterND (s, points, square)",
    'y = ScatterND <reduction = "add"> (s, points, square)',
    "a = Gather (s, n0) b = Gather (s, n1) c = Range (a, b, n1) y = Identity (c)",
    "a = Shape (s) y = Concat <axis = 0> (a, s)",
    "a = Size (s) y = Unsqueeze (a, v0)",
    "a = Shape (s) y = ConstantOfShape <value = int64[1] {7}> (a)",
]


def arithmetic(steps: str, opset: int = 18) -> onnx.ModelProto:
    """A model that computes `y` from the shape `s` of its input, by these steps."""
    model = parse(f"arithmetic (float[a, b, c, d] x) => (int64[e] y) {CONSTANTS} {{ s = Shape (x) {steps} }}", opset)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return model


@pytest.mark.parametrize("steps", STEPS)
def test_like_onnxruntime(steps: str) -> None:
    model = arithmetic(steps)
    net = onward.to_torch(model)
    actual, (expected,) = to_array(net(X)), run_onnxruntime(model, X)
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected)


GROWING = ("Expand", "Tile", "Range", "ConstantOfShape")


@pytest.mark.parametrize("steps", [steps for steps in STEPS if not any(op in steps for op in GROWING)])
def test_no_tensor_is_made_on_the_way(steps: str) -> None:
    """Only the result, asked for as an output, becomes a tensor: one call of `to_tensor`, none of a tensor lowering."""
    net = onward.to_torch(arithmetic(steps))
    calls = [node for node in net.program.code.graph.nodes if node.op == "call_function"]
    modules = {node.target.__module__ for node in calls}
    allowed = {"onward.lowering.ops.host_movement", "onward.lowering.ops.shapes", "onward.lowering.kernels.host"}
    assert modules <= allowed | {"onward.lowering.program"}
    assert sum(node.target.__name__ == "to_tensor" for node in calls) == 1
    assert all(node.target.__name__ != "to_host" for node in calls)


OLD = [
    "y = Unsqueeze <axes = [1]> (s)",
    "a = Gather (s, v1) y = Squeeze <axes = [0]> (a)",
    "y = Slice <starts = [1], ends = [3]> (s)",
    "z, y = Split <split = [1, 3]> (s)",
    "y, z = Split (s)",
]


@pytest.mark.parametrize("steps", OLD)
def test_versions_with_attributes(steps: str) -> None:
    model = arithmetic(steps, 9)
    actual, (expected,) = to_array(onward.to_torch(model)(X)), run_onnxruntime(model, X)
    np.testing.assert_array_equal(actual, expected)
    assert actual.shape == expected.shape


def test_large_results_are_tensors_not_numbers() -> None:
    """A mask of ones of the size of the data is not written out as Python numbers."""
    model = parse(
        """
        fill (float[a, b] x) => (int64[c, d] y)
        <int64 one = {1}>
        { s = Shape (x) y = Expand (one, s) }
        """,
        18,
    )
    net = onward.to_torch(model)
    assert net(torch.zeros(300, 200)).sum() == 60000
    labels = [node.meta["onnx"] for node in net.program.code.graph.nodes if "onnx" in node.meta]
    assert {label.op_type for label in labels if isinstance(label, NodeLabel)} == {"Shape", "Expand"}
    assert "host_movement" not in net.program.code.code


def test_constants_fold_before_anything_runs() -> None:
    model = parse(
        "fold (float[n] x) => (float[m, k] y) <int64[1] v = {-1}, int64[1] one = {1}> "
        "{ s = Concat <axis = 0> (v, one) t = Slice (s, one, v) u = Concat <axis = 0> (one, v, t) y = Reshape (x, u) }",
        18,
    )
    net = onward.to_torch(model)
    assert net(torch.arange(3.0)).shape == (1, 3)
    assert sum(node.op == "call_function" for node in net.program.code.graph.nodes) == 1


def test_impossible_arithmetic_of_constants_names_the_node() -> None:
    model = parse(
        "bad (float[n] x) => (float[m] y) <int64[2] v = {3, 4}, int64[1] zero = {0}> "
        "{ [squeezer] s = Squeeze (v, zero) y = Expand (x, s) }",
        18,
    )
    with pytest.raises(NodeError, match=r"node 'squeezer' \(Squeeze\) failed on the constants .*axis 0 has size 2"):
        onward.to_torch(model)


def test_scalars_cannot_be_joined() -> None:
    model = parse("bad (float[n] x) => (int64 y) <int64 a = {3}> { [joiner] y = Concat <axis = 0> (a, a) }", 18)
    with pytest.raises(NodeError, match=r"node 'joiner' \(Concat\).*rank-0 values cannot be concatenated"):
        onward.to_torch(model)(torch.zeros(1))
