"""Arithmetic of shapes: every operator on Python values equals the same operator on tensors, and leaves none behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch._dynamo.testing
from onnx import TensorProto, helper, numpy_helper

import onward
from onward.errors import ModelError
from onward.lowering.kernels.host import freeze, host_shape, map_broadcast, to_host, to_tensor
from onward.lowering.registry import find_host_lowering
from tests.one_node import make_model, run, to_array

A, B = np.array([[7, -7, 3], [0, 5, -9]]), np.array([2, -3, 4])
F = np.array([[2.5, -1.5, 0.1], [4.0, 9.0, 0.25]], np.float32)
POSITIVE = np.array([0.5, 2.0, 3.0], np.float32)
FLAGS, ROW = np.array([[True, False, True], [False, False, True]]), np.array([True, True, False])

OPERATORS: list[tuple[str, tuple[np.ndarray, ...], dict[str, Any], int]] = [
    *[(op, (A, B), {}, 16) for op in ("Add", "Sub", "Mul", "Div", "Max", "Min")],
    *[(op, (F, POSITIVE), {}, 16) for op in ("Add", "Sub", "Mul", "Div", "Max", "Min")],
    *[(op, (A, B), {}, 16) for op in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")],
    *[(op, (FLAGS, ROW), {}, 16) for op in ("And", "Or", "Xor", "Equal")],
    ("Not", (FLAGS,), {}, 13),
    ("Mod", (A, B), {}, 13),
    ("Mod", (A, B), {"fmod": 1}, 13),
    ("Mod", (F, POSITIVE), {"fmod": 1}, 13),
    ("Pow", (np.abs(A), np.array(2)), {}, 15),
    ("Pow", (np.abs(F), POSITIVE), {}, 15),
    ("Pow", (np.abs(A), POSITIVE), {}, 15),
    *[(op, (A,), {}, 13) for op in ("Neg", "Abs", "Sign")],
    *[(op, (F,), {}, 13) for op in ("Neg", "Abs", "Sign", "Floor", "Ceil", "Round", "Reciprocal")],
    ("Sqrt", (np.abs(F),), {}, 13),
    ("Clip", (A, np.array(-5), np.array(4)), {}, 13),
    ("Where", (FLAGS, A, B), {}, 16),
    ("Where", (FLAGS, F, POSITIVE), {}, 16),
    *[("Cast", (A,), {"to": to}, 13) for to in (TensorProto.FLOAT, TensorProto.INT32, TensorProto.BOOL)],
    *[("Cast", (A,), {"to": to}, 13) for to in (TensorProto.UINT8, TensorProto.INT8, TensorProto.FLOAT16)],
    *[("Cast", (F,), {"to": to}, 13) for to in (TensorProto.INT64, TensorProto.BOOL, TensorProto.DOUBLE)],
    ("Cast", (FLAGS,), {"to": TensorProto.INT64}, 13),
    ("CastLike", (A, POSITIVE), {}, 15),
    *[(op, (A, np.array([1])), {"keepdims": 0}, 18) for op in ("ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin")],
    *[(op, (A, np.array([0, -1])), {}, 18) for op in ("ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin")],
    *[(op, (A,), {"keepdims": 0}, 18) for op in ("ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin")],
    *[(op, (A,), {"axes": [0]}, 11) for op in ("ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin")],
    ("ReduceSum", (A,), {"noop_with_empty_axes": 1}, 13),
]  # fmt: skip


@pytest.mark.parametrize(("op_type", "inputs", "attributes", "opset"), OPERATORS)
def test_equals_the_operator_on_tensors(op_type: str, inputs: tuple, attributes: dict[str, Any], opset: int) -> None:
    expected = run(make_model(op_type, {f"i{k}": v for k, v in enumerate(inputs)}, attributes, opset), *inputs)
    lowering = find_host_lowering("", op_type, opset)
    assert lowering is not None
    tensors = [torch.from_numpy(np.array(value)) for value in inputs]
    keywords = {name: freeze(value) for name, value in attributes.items()}
    if "dtypes" in lowering.reserved:
        keywords["dtypes"] = tuple(t.dtype for t in tensors)
    result = lowering.function(*(to_host(t) for t in tensors), **keywords)
    assert host_shape(result) == tuple(expected.shape)
    assert result == freeze(expected.tolist())


def test_floats_are_rounded_as_float32_rounds_them() -> None:
    """5 * (1/5 in float32) is a little more than 1 in exact arithmetic, and 1 in float32: the ceiling must be 1."""
    mul, ceil = find_host_lowering("", "Mul", 13), find_host_lowering("", "Ceil", 13)
    assert mul is not None
    assert ceil is not None
    fifth = float(np.float32(0.2))
    assert fifth * 5 > 1
    product = mul.function(5.0, fifth, dtypes=(torch.float32, torch.float32))
    assert ceil.function(product) == 1.0


def test_broadcasting_of_nested_tuples() -> None:
    assert map_broadcast(lambda a, b: a + b, ((1,), (2,)), (10, 20)) == ((11, 21), (12, 22))
    assert map_broadcast(lambda a, b: a + b, 1, ()) == ()
    with pytest.raises(ValueError, match=r"lengths \[2, 3\] along one axis do not broadcast"):
        map_broadcast(lambda a, b: a + b, (1, 2), (1, 2, 3))


def test_division_by_zero() -> None:
    div = find_host_lowering("", "Div", 14)
    assert div is not None
    floats = (torch.float32, torch.float32)
    assert div.function((1.0, -1.0), 0.0, dtypes=floats) == (float("inf"), float("-inf"))
    with pytest.raises(ValueError, match="3 is divided by zero"):
        div.function(3, 0, dtypes=(torch.int64, torch.int64))


def _resizing_model() -> onnx.ModelProto:
    """Reshapes [b, 4, d] to [b * (4 // 2), 2 * d if sqrt(d) >= 2 else d] by arithmetic on its shape."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["b"]),
        helper.make_node("Gather", ["shape", "one"], ["c"]),
        helper.make_node("Gather", ["shape", "two"], ["d"]),
        helper.make_node("Div", ["c", "two"], ["half"]),
        helper.make_node("Mul", ["b", "half"], ["rows"]),
        helper.make_node("Cast", ["d"], ["real"], to=TensorProto.FLOAT),
        helper.make_node("Sqrt", ["real"], ["root"]),
        helper.make_node("Floor", ["root"], ["floor"]),
        helper.make_node("Cast", ["floor"], ["whole"], to=TensorProto.INT64),
        helper.make_node("Greater", ["whole", "one"], ["large"]),
        helper.make_node("Where", ["large", "two", "one"], ["factor"]),
        helper.make_node("Mul", ["factor", "d"], ["columns"]),
        helper.make_node("Unsqueeze", ["rows", "axis"], ["rows_1"]),
        helper.make_node("Unsqueeze", ["columns", "axis"], ["columns_1"]),
        helper.make_node("Concat", ["rows_1", "columns_1"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
    ]
    initializers = {"zero": np.array(0), "one": np.array(1), "two": np.array(2), "axis": np.array([0])}
    graph = helper.make_graph(
        nodes,
        "resizing",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", "c", "d"])],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(value, name) for name, value in initializers.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 16)], ir_version=8)


def test_shape_arithmetic_leaves_no_tensor_and_no_wait_behind() -> None:
    net = onward.to_torch(_resizing_model())
    called = {node.target for node in net.program.code.graph.nodes if node.op == "call_function"}
    assert to_host not in called
    assert to_tensor not in called
    assert net(torch.randn(2, 4, 9)).shape == (4, 18)
    assert net(torch.randn(5, 2, 16)).shape == (5, 32)


def test_shape_arithmetic_compiles_whole_with_dynamic_sizes() -> None:
    """One compilation serves every size that takes the same side of the model's own comparison."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    net = torch.compile(onward.to_torch(_resizing_model()), fullgraph=True, backend=counter, dynamic=True)
    for b, d in ((2, 9), (3, 16), (7, 25), (4, 10)):
        assert net(torch.randn(b, 4, d)).shape == (2 * b, 2 * d)
    assert counter.frame_count == 1


def test_a_failing_constant_is_named() -> None:
    """Integer division of two constants happens while the model is read."""
    model = make_model("Div", {"A": None, "B": None}, {}, 14, initializers={"A": np.array(3), "B": np.array(0)})
    with pytest.raises(ModelError, match=r"node 'node' \(Div\) failed on the constants \(3, 0\): 3 is divided by zero"):
        run(model)


def test_integers_wrap_around_as_their_type_does() -> None:
    model = make_model(
        "Add",
        {"A": None, "B": None},
        {},
        14,
        initializers={"A": np.array([127, 1], np.int8), "B": np.array([1, 1], np.int8)},
    )
    assert to_array(run(model)).tolist() == [-128, 2]
