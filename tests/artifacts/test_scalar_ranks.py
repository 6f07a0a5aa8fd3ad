"""Scalars of elementwise operators have the rank of tensors that end in axes of size 1, and results stay the same."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime

from onward.artifacts.optimizer_graph import add_input, add_output, empty_model
from onward.artifacts.scalar_ranks import align_scalars
from onward.graph.nodes.node_writer import NodeWriter

FLOAT = ir.DataType.FLOAT


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(ir.serde.serialize_model(model).SerializeToString())
    return [np.asarray(found) for found in session.run(None, feeds)]


def test_scalars_get_the_rank_of_tensors_that_end_in_ones() -> None:
    model = empty_model("scaled")
    writer = NodeWriter(model, "")
    tensor, flat = add_input(model, "tensor", FLOAT, (4, 3, 1, 1)), add_input(model, "flat", FLOAT, (4, 3))
    given = add_input(model, "given", FLOAT, ())
    computed = writer.apply("Sqrt", writer.apply("ReduceSumSquare", tensor, keepdims=0))
    table = writer.apply("Gather", writer.constant([1.5, 2.5], "table", np.float32), writer.constant(1, "row"))
    values = [
        writer.apply("Sub", writer.constant(2.0, "two", np.float32), tensor),
        writer.apply("Mul", tensor, given),
        writer.apply("Div", writer.apply("Add", tensor, computed), table),
        writer.apply("Mul", flat, given),
        writer.apply("Mul", tensor, tensor),
    ]
    for number, value in enumerate(values):
        add_output(model, value, f"result_{number}", FLOAT, flat.shape if number == 3 else tensor.shape)
    generator = np.random.default_rng(0)
    feeds = {
        "tensor": generator.random((4, 3, 1, 1), np.float32),
        "flat": generator.random((4, 3), np.float32),
        "given": np.array(0.3, np.float32),
    }
    before = run(model, feeds)
    assert align_scalars(model) == 4
    model.graph.sort()
    for mine, expected in zip(run(model, feeds), before, strict=True):
        assert np.array_equal(mine, expected)
    products = [node for node in model.graph if node.op_type == "Mul"]
    assert [value.name for value in products[1].inputs if value is not None] == ["flat", "given"]
    assert align_scalars(model) == 0, "operands of the tensor's rank are left alone"


def test_scalars_of_the_main_graph_are_aligned_inside_of_branches() -> None:
    model = empty_model("branch")
    writer = NodeWriter(model, "")
    tensor, given = add_input(model, "tensor", FLOAT, (2, 1)), add_input(model, "given", FLOAT, ())
    chosen = writer.apply("Greater", given, writer.constant(0.0, "zero", np.float32))
    rate = writer.apply("Mul", given, given)
    bodies = []
    for name, op_type in (("then_branch", "Mul"), ("else_branch", "Sub")):
        node = ir.node(op_type, [tensor, rate], outputs=[ir.Value(name=f"{name}_result")], name=name)
        bodies.append(ir.AttrGraph(name, ir.Graph([], node.outputs, nodes=[node], name=name)))
    model.graph.append(ir.Node("", "If", [chosen], bodies, outputs=[ir.Value(name="out")], name="if"))
    add_output(model, model.graph[-1].outputs[0], "result", FLOAT, tensor.shape)
    assert align_scalars(model) == 2
    assert [node.op_type for node in model.graph].count("Reshape") == 1, "both branches share it"
    x = np.array([[1.0], [2.0]], np.float32)
    assert np.array_equal(run(model, {"tensor": x, "given": np.array(2, np.float32)})[0], x * 4)
    assert np.array_equal(run(model, {"tensor": x, "given": np.array(-2, np.float32)})[0], x - 4)
