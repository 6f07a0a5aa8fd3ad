"""Another model moved into a graph: its opset, its names, its domains."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from onward.errors import ModelError
from onward.graph.merging.merged_graph import at_opset, check_other_domains, move, rename
from onward.graph.nodes.node_writer import NodeWriter
from onward.parameters.limits import DEFAULT_LIMITS


def model_of(body: str, opset: int = 18, more: str = "") -> ir.Model:
    text = f'<ir_version: 8, opset_import: ["": {opset}{more}]> g (float[2, 2] x) => (float[2, 2] y)'
    return ir.from_proto(onnx.parser.parse_model(f"{text} <float[1] w = {{1.0}}> {{ {body} }}"))


def test_a_model_whose_operators_did_not_change_stays() -> None:
    merged = model_of("y = Add(x, w)", 13)
    assert at_opset(merged, NodeWriter(model_of("y = Relu(x)", 20), "m/"), "the loss", DEFAULT_LIMITS) is merged


def test_others_are_converted_or_refused() -> None:
    writer = NodeWriter(model_of("y = Relu(x)", 18), "m/")
    converted = at_opset(model_of("y = Softmax<axis = 1>(x)", 11), writer, "the loss", DEFAULT_LIMITS)
    assert converted.opset_imports[""] == 18
    with pytest.raises(ModelError, match=r"the loss is written for opset 18 and the model for opset 7, between which "):
        at_opset(model_of("y = Mish(x)", 18), NodeWriter(model_of("y = Relu(x)", 7), "m/"), "the loss", DEFAULT_LIMITS)


def test_names_that_the_graph_has_get_others() -> None:
    target, merged = model_of("h = Relu(x) y = Add(h, w)"), model_of("h = Abs(x) y = Add(h, w)")
    writer = NodeWriter(target, "m/")
    rename(writer, merged.graph)
    assert [node.outputs[0].name for node in merged.graph] == ["m/h", "m/y"]
    again = model_of("h = Abs(x) y = Add(h, w)")
    rename(writer, again.graph)
    names = [node.outputs[0].name for node in again.graph]
    assert not set(names) & {"m/h", "m/y"}
    assert len({node.name for node in (*merged.graph, *again.graph)}) == 4


def test_what_is_moved_belongs_to_the_graph() -> None:
    target, merged = model_of("y = Relu(x)"), model_of("y = Add(x, w)")
    writer = NodeWriter(target, "m/")
    rename(writer, merged.graph)
    move(writer, merged.graph)
    assert [node.op_type for node in target.graph] == ["Relu", "Add"]
    assert len(list(merged.graph)) == 0
    assert "m/w" in target.graph.initializers
    assert writer.constants[-1] == "m/w"


def test_domains_must_agree() -> None:
    target = model_of("y = Relu(x)", more=', "acme": 2')
    writer = NodeWriter(target, "m/")
    check_other_domains(writer, model_of("y = other.Relu(x)", more=', "other": 3'), "the loss")
    assert target.opset_imports["other"] == 3
    with pytest.raises(ModelError, match="the loss uses version 1 of the domain 'acme'; the model uses 2"):
        check_other_domains(writer, model_of("y = acme.Relu(x)", more=', "acme": 1'), "the loss")
    with pytest.raises(ModelError, match="operators of the domain 'acme' but imports no version of it"):
        check_other_domains(writer, model_of("y = acme.Relu(x)"), "the loss")
