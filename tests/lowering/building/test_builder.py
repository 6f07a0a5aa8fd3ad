"""The code made of a graph is the graph's own arithmetic, whatever its values are called."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import onward
from onward.errors import ModelError
from onward.lowering.building.builder import build_program


def test_initializers_called_like_steps_of_the_code_keep_their_numbers() -> None:
    """Exports name folded tensors "mul_1", "mul_2", ...: what the code calls its own steps, too."""
    count = 6
    values = [np.float32(2 + i) * np.ones(i + 1, np.float32) for i in range(count)]
    nodes, last = [], "x"
    for i in range(count):
        nodes.append(helper.make_node("Mul", [last, f"mul_{i + 1}"], [f"product_{i}"], name=f"n{i}"))
        nodes.append(helper.make_node("ReduceSum", [f"product_{i}"], [f"mul{i}"], keepdims=0, name=f"s{i}"))
        last = f"mul{i}"
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [])],
        [helper.make_tensor_value_info(last, TensorProto.FLOAT, [])],
        [numpy_helper.from_array(value, f"mul_{i + 1}") for i, value in enumerate(values)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    onnx.checker.check_model(model)
    net = onward.to_torch(model)
    expected = float(np.prod([value.sum() for value in values]))
    assert net(torch.tensor(0.5)).item() == 0.5 * expected


def test_a_node_that_lacks_an_input_is_named() -> None:
    """As a caller that builds its own graph may hand it over: files are checked when they are read."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([3]))
    node = ir.node("Add", [x], name="half")
    graph = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 18})
    with pytest.raises(ModelError, match=r"half.* lacks its input 'B' \(input 1\)"):
        build_program(graph, {"": 18})


def test_an_initializer_of_a_nested_graph_must_be_lifted_first() -> None:
    """As a caller that builds its own graph may hand it over: `to_torch` lifts them."""
    stored = ir.tensor(np.float32([2]), name="stored")
    inner = ir.Value(name="stored", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1]), const_value=stored)
    branch = ir.node("Neg", [inner], name="negative")
    body = ir.Graph([], branch.outputs, nodes=[branch], initializers=[inner], name="branch")
    flag = ir.Value(name="flag", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
    node = ir.node("If", [flag], attributes={"then_branch": body, "else_branch": body.clone()}, name="choice")
    graph = ir.Graph([flag], node.outputs, nodes=[node], opset_imports={"": 18})
    with pytest.raises(ModelError, match="nested graph 'branch' holds the initializer 'stored'; lift it first"):
        build_program(graph, {"": 18})
