"""What an export in training mode left on is turned off; where the caller decides, it stays."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from onward.graph.repair.inference_mode import switch_to_inference

STATISTICS = {name: np.ones(2, np.float32) for name in ("s", "b", "m", "v")}


def switched(body: str, inputs: str = "float[n, 2] x", opset: int = 15, **tensors: np.ndarray) -> ir.Model:
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> g ({inputs}) => (y) {{ {body} }}')
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in tensors.items())
    model = ir.from_proto(proto)
    switch_to_inference(model)
    return model


def test_batch_statistics_become_running_ones_and_their_readers_read_those() -> None:
    body = "y, m2, v2 = BatchNormalization<training_mode = 1>(x, s, b, m, v) z = Add(m2, v2)"
    model = switched(body, **STATISTICS)
    norm = next(node for node in model.graph if node.op_type == "BatchNormalization")
    assert norm.attributes["training_mode"].as_int() == 0
    assert len(norm.outputs) == 1
    add = next(node for node in model.graph if node.op_type == "Add")
    sources = [value.producer() for value in add.inputs if value is not None]
    assert [(one.op_type, one.inputs[0].name) for one in sources if one is not None and one.inputs[0] is not None] == [
        ("Identity", "m"), ("Identity", "v"),
    ]  # fmt: skip
    assert [value.name for value in add.inputs if value is not None] == ["m2", "v2"]


def test_before_opset_14_further_outputs_say_that_a_node_trains() -> None:
    model = switched("y, m2, v2, m3, v3 = BatchNormalization(x, s, b, m, v)", opset=9, **STATISTICS)
    assert [len(node.outputs) for node in model.graph] == [1]


def test_statistics_that_are_inputs_and_inference_mode_stay() -> None:
    given = switched(
        "y, m2, v2 = BatchNormalization<training_mode = 1>(x, s, b, m, v)",
        "float[n, 2] x, float[2] m, float[2] v", **{name: STATISTICS[name] for name in ("s", "b")},
    )  # fmt: skip
    assert given.graph[0].attributes["training_mode"].as_int() == 1
    still = switched("y, m2, v2 = BatchNormalization<training_mode = 0>(x, s, b, m, v)", **STATISTICS)
    assert len(still.graph[0].outputs) == 3


def dropout_inputs(mode: str, inputs: str = "float[n, 2] x", **tensors: np.ndarray) -> int:
    model = switched(f"{mode} y = Dropout(x, r, t)", inputs, r=np.array(0.5, np.float32), **tensors)
    return len(model.graph[-1].inputs)


def test_dropout_that_is_stored_as_on_is_turned_off() -> None:
    assert dropout_inputs("", t=np.array(True)) == 2
    assert dropout_inputs("t = Constant<value = bool {1}>()") == 2
    assert dropout_inputs("", t=np.array(False)) == 3
    assert dropout_inputs("", "float[n, 2] x, bool t") == 3


def test_nested_graphs_are_switched_too() -> None:
    branch = "g1 () => (a) { a = Dropout(x, r, t) }"
    model = switched(
        f"y = If(c) <then_branch = {branch}, else_branch = {branch.replace('g1', 'g2')}>", "float[n, 2] x, bool c",
        r=np.array(0.5, np.float32), t=np.array(True),
    )  # fmt: skip
    inner = [attribute.as_graph()[0] for attribute in model.graph[0].attributes.values()]
    assert [len(node.inputs) for node in inner] == [2, 2]
