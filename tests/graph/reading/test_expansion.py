"""Operators with a body, written out in simpler ones: onnxruntime computes the same before and after."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onward.errors import ModelError
from onward.graph.reading import expansion
from onward.graph.reading.expansion import expand_function_operators, is_expandable
from tests.one_node import make_model, run_onnxruntime

RANDOM = np.random.default_rng(0)


def single(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], int]] = {
    "plain": ("HardSwish", {"x": single(3, 4)}, {}, 20),
    "default of an attribute": ("Selu", {"x": single(3, 4)}, {}, 20),
    "given attribute": ("Elu", {"x": single(3, 4)}, {"alpha": 0.5}, 20),
    "body by type": ("Celu", {"x": single(3, 4)}, {"alpha": 2.0}, 20),
    "optional input left out": ("Clip", {"x": single(5), "min": None, "max": np.array(0.5, np.float32)}, {}, 20),
    "body within a body": (
        "SoftmaxCrossEntropyLoss",
        {"x": single(3, 4), "y": np.array([0, 2, 1])},
        {"reduction": "sum"},
        13,
    ),
    "body of an older opset": ("LayerNormalization", {"x": single(2, 5), "w": single(5), "b": single(5)}, {}, 21),
    "body with a choice": ("MeanVarianceNormalization", {"x": single(1, 2, 3, 3)}, {}, 18),
}


def functions() -> set[tuple[str, str]]:
    schemas = onnx.defs.get_all_schemas_with_history()
    return {(s.domain, s.name) for s in schemas if s.has_function or s.has_context_dependent_function}


def primitive(domain: str, op_type: str, version: int) -> bool:
    """As if only operators without a body were computed."""
    return (domain, op_type) not in functions()


@pytest.mark.parametrize("name", list(CASES))
def test_body_computes_the_same(name: str) -> None:
    op_type, inputs, attributes, opset = CASES[name]
    proto = make_model(op_type, inputs, attributes, opset)
    model = ir.from_proto(proto)
    lines = expand_function_operators(model, primitive)
    assert lines[0] == f"node 'node' ({op_type}) was expanded into simpler operators."
    assert not [node for node in model.graph if (node.domain, node.op_type) in functions()]
    assert not model.functions
    written = ir.to_proto(model)
    given = [value for value in inputs.values() if value is not None]
    for left, right in zip(run_onnxruntime(proto, *given), run_onnxruntime(written, *given), strict=True):
        np.testing.assert_allclose(right, left, rtol=1e-5, atol=1e-6)


def test_what_has_a_lowering_stays() -> None:
    model = ir.from_proto(make_model("HardSwish", {"x": single(3)}, opset=20))
    assert expand_function_operators(model, lambda *operator: True) == ()
    assert [node.op_type for node in model.graph] == ["HardSwish"]


def test_nested_graphs_are_expanded_and_constants_lifted() -> None:
    model = ir.from_proto(
        onnx.parser.parse_model(
            '<ir_version: 9, opset_import: ["" : 20]> pick (bool flag, float[n] x) => (float[m] y) '
            "{ y = If (flag) <then_branch = t () => (float[a] u) { u = Softsign (x) }, "
            "else_branch = e () => (float[a] u) { u = Softplus (x) }> }"
        )
    )
    assert len(expand_function_operators(model, primitive)) >= 2
    inner = [node for node in ir.traversal.RecursiveGraphIterator(model.graph) if node.op_type != "If"]
    assert {node.op_type for node in inner} <= {"Abs", "Add", "Div", "Exp", "Log", "Cast"}
    assert model.graph.initializers
    x = single(4)
    result = run_onnxruntime(ir.to_proto(model), np.array(True), x)[0]
    np.testing.assert_allclose(result, x / (1 + np.abs(x)), rtol=1e-6)


def test_two_nodes_of_one_operator_keep_apart() -> None:
    text = '<ir_version: 9, opset_import: ["" : 20]> two (float[n] x) => (float[n] y) { a = Selu (x) y = Selu (a) }'
    proto = onnx.parser.parse_model(text)
    model = ir.from_proto(proto)
    assert len(expand_function_operators(model, primitive)) > 2
    x = single(4)
    np.testing.assert_allclose(
        run_onnxruntime(ir.to_proto(model), x)[0], run_onnxruntime(proto, x)[0], rtol=1e-5, atol=1e-6
    )


def test_an_unknown_type_is_named() -> None:
    """A body that depends on the type of an input of a foreign operator cannot be chosen."""
    text = (
        '<ir_version: 9, opset_import: ["" : 20, "their" : 1]> '
        "foreign (float[n] x) => (float[n] y) { a = their.Thing (x) [soft] y = Softmax (a) }"
    )
    model = ir.from_proto(onnx.parser.parse_model(text))
    with pytest.raises(ModelError, match=r"node 'soft' \(Softmax\).*type of 'a', which is not known"):
        expand_function_operators(model, primitive)


def test_is_expandable() -> None:
    assert is_expandable("", "LayerNormalization", 17)
    assert not is_expandable("", "LayerNormalization", 16)
    assert not is_expandable("", "Conv", 20)
    assert not is_expandable("", "NoSuchOperator", 20)


def test_bodies_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expansion, "_MOST_ROUNDS", 1)
    op_type, inputs, attributes, opset = CASES["body within a body"]
    with pytest.raises(
        ModelError, match=r"nest more than 1 deep; the last was node 'node' \(SoftmaxCrossEntropyLoss\)"
    ):
        expand_function_operators(ir.from_proto(make_model(op_type, inputs, attributes, opset)), primitive)
