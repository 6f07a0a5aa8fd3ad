"""The operator `Gradient`: the part of the graph that it names becomes its own."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from onward.errors import ModelError
from onward.graph.reading.differentiated import enclose_differentiated_graphs

TEXT = """<ir_version: 8, opset_import: ["": 18, "ai.onnx.preview.training": 1]> g (float[2] x, float[2] z) => (d)
    <float[2] w = {1.0, 2.0}> { h = Mul(x, w)  y = Add(h, z)
    [grad] d = ai.onnx.preview.training.Gradient <%s> (%s) }"""


def enclosed(attributes: str, inputs: str = "x, z") -> ir.Model:
    model = ir.from_proto(onnx.parser.parse_model(TEXT % (attributes, inputs)))
    enclose_differentiated_graphs(model)
    return model


def test_the_body_computes_y_from_xs_and_zs_and_reads_weights_from_outside() -> None:
    model = enclosed('xs = ["x"], zs = ["z"], y = "y"')
    gradient = model.graph[-1]
    body = gradient.attributes["body"].as_graph()
    assert [value.name for value in body.inputs] == ["x", "z"]
    assert [value.name for value in body.outputs] == ["y"]
    assert [node.op_type for node in body] == ["Mul", "Add"]
    assert body[0].inputs[1] is model.graph.initializers["w"]
    enclose_differentiated_graphs(model)  # a second time changes nothing
    assert gradient.attributes["body"].as_graph() is body


def test_by_a_weight_is_differentiated_as_by_an_input() -> None:
    body = enclosed('xs = ["w", "x", "z"], y = "y"', "w, x, z").graph[-1].attributes["body"].as_graph()
    assert [value.name for value in body.inputs] == ["w", "x", "z"]
    assert not body.initializers
    assert body.inputs[0].const_value is None


@pytest.mark.parametrize(
    ("attributes", "inputs", "words"),
    [
        ('xs = ["x"]', "x", r"node 'grad' \(Gradient\) must name the value `y`"),
        ('y = "y"', "x", "must name the value `y` to differentiate and the values `xs`"),
        ('xs = ["x"], y = "y"', "x, z", "has 2 inputs for the 1 values of xs and zs"),
        ('xs = ["x"], y = "y"', "x", r"'y' is not determined by xs and zs \(x\)"),
    ],
)
def test_borders_that_do_not_determine_it(attributes: str, inputs: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        enclosed(attributes, inputs)
