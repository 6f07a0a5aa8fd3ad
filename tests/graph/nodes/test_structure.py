"""Files that are not well formed are refused with the node, the name and the reason."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from onward.errors import ModelError
from onward.graph.nodes.structure import check_proto, check_structure, check_text, label


def parsed(body: str, opset: str = '"" : 18') -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"<ir_version: 8, opset_import: [{opset}]> g (float[2] x) => (float[2] y) {{ {body} }}"
    )


def refused(model: onnx.ModelProto) -> str:
    with pytest.raises(ModelError) as caught:
        check_structure(ir.from_proto(model), "the model")
    return str(caught.value)


WRONG = {
    "too few inputs": ("y = Add(x)", "node 'y' (Add) has 1 inputs; the operator takes 2."),
    "too many inputs": ("y = Clip(x, x, x, x)", "node 'y' (Clip) has 4 inputs; the operator takes 1 to 3."),
    "no inputs": ("y = Concat<axis=0>()", "has 0 inputs; the operator takes at least 1."),
    "too many outputs": ("y, z = Relu(x)", "node 'y' (Relu) has 2 outputs; the operator gives 1."),
    "unknown attribute": ("y = Relu<slope=1.0>(x)", "has the attribute 'slope'; Relu of version 14 knows: none."),
    "kind of attribute": ("y = Elu<alpha=1>(x)", "its attribute 'alpha' is of kind INT; expected FLOAT."),
    "lacking attribute": ("y = Concat(x)", "lacks its attribute 'axis'."),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_node_that_its_schema_forbids(case: str) -> None:
    body, words = WRONG[case]
    assert words in refused(parsed(body))


def test_names_that_lead_nowhere_come_with_a_near_one() -> None:
    message = refused(parsed("hidden = Relu(x) y = Relu(hiden)"))
    assert "node 'y' (Relu) reads 'hiden' as input 0, which is neither an input, nor an initializer, nor" in message
    assert message.endswith("did you mean 'hidden'?")
    assert "nothing computes the output 'y' of graph 'g'." in refused(parsed("z = Relu(x)"))


def test_opsets() -> None:
    assert "imports no opset of the standard domain" in refused(parsed("y = Relu(x)", '"acme" : 1'))
    for version in (0, 99):
        assert f"is written for opset {version}; opsets 1 to 28 are known." in refused(
            parsed("y = Relu(x)", f'"" : {version}')
        )


def test_other_domains_and_own_functions_are_not_compared_with_schemas() -> None:
    model = ir.from_proto(parsed("z = acme.Relu<slope=1.0>(x, x) y = Relu(z)", '"" : 18, "acme" : 1'))
    check_structure(model, "the model")
    assert label(model.graph[0]) == "node 'z' (Relu)"


def test_a_graph_without_outputs() -> None:
    model = parsed("y = Relu(x)")
    del model.graph.output[:]
    assert refused(model) == "the model has no outputs."


def test_a_stored_tensor_of_another_type_than_declared() -> None:
    model = parsed("y = Add(x, w)")
    model.graph.initializer.append(helper.make_tensor("w", onnx.TensorProto.FLOAT, [2], [1, 2]))
    declared = ir.from_proto(model)
    declared.graph.initializers["w"].dtype = ir.DataType.INT64
    with pytest.raises(ModelError, match="initializer 'w' is stored as FLOAT but declared as INT64"):
        check_structure(declared, "the model")


def test_what_onnx_ir_would_pass_over() -> None:
    tensor = helper.make_tensor("w", onnx.TensorProto.FLOAT, [1], [1])
    cases = []
    for change, words in (
        (lambda g: g.initializer.extend([tensor, tensor]), "graph 'g' has two initializers named 'w'."),
        (lambda g: g.input.append(g.input[0]), "graph 'g' has two inputs named 'x'."),
        (lambda g: g.initializer.append(onnx.TensorProto(data_type=1)), "an initializer of graph 'g' has no name."),
        (
            lambda g: g.node.append(g.node[0]),
            "node 'y' (Relu) computes 'y', which is also an output of node 'y' (Relu).",
        ),
        (lambda g: g.initializer.append(helper.make_tensor("y", 1, [1], [1])), "'y', which is also an initializer."),
        (lambda g: g.initializer.append(onnx.TensorProto(name="w", data_type=77)), "'w' has the element type 77, unk"),
    ):
        model = parsed("y = Relu(x)")
        change(model.graph)
        cases.append((model, words))
    cases.append((onnx.ModelProto(), "the model holds no graph."))
    for model, words in cases:
        with pytest.raises(ModelError) as caught:
            check_proto(model, "the model")
        assert words in str(caught.value)


def test_duplicates_inside_of_nested_graphs_are_found() -> None:
    inner = helper.make_graph([helper.make_node("Relu", ["a"], ["b"])] * 2, "inner", [], [])
    model = parsed("y = Relu(x)")
    model.graph.node.append(helper.make_node("If", ["x"], ["z"], then_branch=inner, else_branch=inner))
    with pytest.raises(ModelError, match=r"computes 'b', which is also an output"):
        check_proto(model, "m")


def test_names_that_are_no_text() -> None:
    check_text(["größe", ""], "m")
    with pytest.raises(ModelError, match=r"m: the name b'\\xff' is not UTF-8 text; the file is damaged"):
        check_text([b"\xff"], "m")
