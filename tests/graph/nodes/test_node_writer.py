"""Nodes added to a graph: names that nothing else has, and forms of the model's own opset."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import pytest

from onward.graph.nodes.node_writer import NodeWriter, TakenNames, free_name, make_attribute, value_names


def model_of(body: str = "y = Relu(x)", opset: int = 18) -> ir.Model:
    text = f'<ir_version: 8, opset_import: ["": {opset}]> g (float[2, 1, 3] x, bool c) => (y) {{ {body} }}'
    return ir.from_proto(onnx.parser.parse_model(text))


def test_names_of_nested_graphs_are_taken_too() -> None:
    branch = "g1 () => (a) <float inner = {1.0}> { a = Add(x, inner) }"
    model = model_of(f"y = If(c) <then_branch = {branch}, else_branch = {branch.replace('g1', 'g2')}>")
    assert {"x", "c", "y", "a", "inner"} <= value_names(model.graph)
    writer = NodeWriter(model, "")
    assert not writer.is_free("inner")
    assert writer.unique("inner") == "inner_2"


def test_names_count_up() -> None:
    taken = TakenNames({"a", "a_2"})
    assert [free_name("a", taken), free_name("a", taken), free_name("b", taken)] == ["a_3", "a_4", "b"]


def test_nodes_and_values_have_names_of_their_own() -> None:
    model = model_of()
    writer = NodeWriter(model, "p/")
    values = [writer.apply("Neg", model.graph.inputs[0]) for _ in range(2)]
    assert [value.name for value in values] == ["p/neg", "p/neg_2"]
    own = writer.apply_own("acme", "Foo", values[0], name="foo", alpha=0.5, sizes=[1, 2])
    node = own.producer()
    assert node is not None
    assert (node.domain, model.opset_imports["acme"]) == ("acme", 1)
    assert list(node.attributes["sizes"].as_ints()) == [1, 2]
    assert writer.constant([1, 2], "k").name == "p/k"
    assert writer.constants == ["p/k"]


@pytest.mark.parametrize(
    ("value", "kind"),
    [(1, "INT"), (True, "INT"), (1.0, "FLOAT"), ("a", "STRING"), ([1], "INTS"), ((), "INTS")],
)
def test_attributes(value: object, kind: str) -> None:
    assert make_attribute("a", value).type.name == kind  # type: ignore[arg-type]


@pytest.mark.parametrize("opset", [7, 11, 12, 13, 23])
def test_every_form_computes_the_same(opset: int) -> None:
    model = model_of(opset=opset)
    writer, x = NodeWriter(model, ""), model.graph.inputs[0]
    results = {
        "squeeze": writer.squeeze(x, 1), "unsqueeze": writer.unsqueeze(x, 3), "sum": writer.sum_over(x, 2),
        "mean": writer.reduce_all(x, "mean"), "size": writer.size_of(x, 2), "reshape": writer.reshape(x, [3, -1]),
        "cast": writer.cast(x, ir.DataType.DOUBLE),
    }  # fmt: skip
    array = np.arange(6, dtype=np.float32).reshape(2, 1, 3)
    for value in results.values():
        model.graph.outputs.append(value)
    proto = ir.to_proto(model)
    for output in list(proto.graph.output)[1:]:
        output.ClearField("type")
    found = onnx.reference.ReferenceEvaluator(proto).run(None, {"x": array, "c": np.array(True)})[1:]
    expected = [array[:, 0], array[..., None], array.sum(2), array.mean(), [3], array.reshape(3, -1), array]
    for name, left, right in zip(results, found, expected, strict=True):
        np.testing.assert_allclose(left, right, err_msg=name)
        assert np.shape(left) == np.shape(right), name
