"""What no runtime reads is left out of a bundle's graphs, and what they compute stays the same."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from onward.artifacts.optimizer_graph import add_input, add_output, empty_model
from onward.device.compact_graphs import drop_descriptions, shorten_names, write_uniform_constants_once
from onward.graph.nodes.node_writer import NodeWriter

FLOAT = ir.DataType.FLOAT


def _model() -> ir.Model:
    """x + ones + a row of numbers, doubled in both branches of a condition."""
    model = empty_model("compact")
    writer = NodeWriter(model, "long/names/of/")
    x, condition = add_input(model, "x", FLOAT, (20, 20)), add_input(model, "condition", ir.DataType.BOOL, ())
    ones = writer.constant(np.full((20, 20), 1.5), "ones", np.float32)
    row = writer.constant(np.arange(400).reshape(20, 20), "row", np.float32)
    held = writer.apply("Add", writer.apply("Add", x, ones), row, name="v3")
    branches = []
    for name in ("then_branch", "else_branch"):
        node = writer.new_node("Add", [held, held], f"long/names/of/{name}")
        branches.append(ir.AttrGraph(name, ir.Graph([], node.outputs, nodes=[node], name=name)))
    chosen = ir.Node("", "If", [condition], branches, outputs=[ir.Value(name="chosen")], name="choice")
    model.graph.append(chosen)
    add_output(model, chosen.outputs[0], "v0", FLOAT, (20, 20))  # a name that a number would have
    for node in model.graph:
        node.metadata_props["stack_trace"] = "/home/somebody/model.py"
        node.doc_string = "/home/somebody/model.py"
        node.outputs[0].metadata_props["scope"] = "/home/somebody"
    return model


def _run(model: ir.Model) -> list[np.ndarray]:
    content = ir.serde.serialize_model(model).SerializeToString()
    given = {"x": np.ones((20, 20), np.float32), "condition": np.array(True)}
    return [np.asarray(one) for one in onnxruntime.InferenceSession(content).run(["v0"], given)]


def test_compact_graphs_compute_the_same_and_keep_the_names_of_inputs_and_outputs() -> None:
    model = _model()
    before = _run(model)
    drop_descriptions(model)
    assert write_uniform_constants_once(model) == 1
    shorten_names(model)
    content = ir.serde.serialize_model(model).SerializeToString()
    assert b"somebody" not in content
    assert b"long/names" not in content
    assert [value.name for value in (*model.graph.inputs, *model.graph.outputs)] == ["x", "condition", "v0"]
    assert np.array_equal(_run(model)[0], before[0])
    assert sorted(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value) == [
        4, 16, 1600,
    ]  # fmt: skip


def test_constants_that_differ_in_one_element_or_are_small_stay() -> None:
    model = empty_model("constants")
    writer = NodeWriter(model, "")
    x = add_input(model, "x", FLOAT, (400,))
    almost = np.zeros(400, np.float32)
    almost[-1] = -0.0  # another number of bits
    value = writer.apply("Add", x, writer.constant(almost, "almost", np.float32))
    value = writer.apply("Add", value, writer.constant(np.zeros(1), "small", np.float32))
    add_output(model, value, "y", FLOAT, (400,))
    assert write_uniform_constants_once(model) == 0


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.uint8])
def test_constants_of_types_that_onnxruntime_does_not_expand_stay(dtype: type[np.generic]) -> None:
    model = empty_model("types")
    writer = NodeWriter(model, "")
    x, condition = add_input(model, "x", FLOAT, (20, 20)), add_input(model, "condition", ir.DataType.BOOL, ())
    ones = writer.store(np.ones((10, 400), dtype), "ones")
    total = writer.apply("ReduceSum", writer.cast(ones, FLOAT), keepdims=0)
    add_output(model, writer.apply("Where", condition, writer.apply("Add", x, total), x), "v0", FLOAT, (20, 20))
    before = _run(model)
    assert write_uniform_constants_once(model) == (dtype in (np.float16, np.uint8))
    assert np.array_equal(_run(model)[0], before[0])
