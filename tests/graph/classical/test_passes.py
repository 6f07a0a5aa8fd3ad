"""Which operators of ai.onnx.ml are written out, where they are, and what types their outputs get."""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx import parser

from onward.graph.classical.passes import REWRITERS, is_rewritten, rewrite_classical
from tests.one_classical_node import model_of


def test_operators_are_those_of_the_domain() -> None:
    assert is_rewritten("ai.onnx.ml", "Scaler")
    assert not is_rewritten("", "Scaler")
    assert not is_rewritten("ai.onnx.ml", "CategoryMapper")
    known = {schema.name for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == "ai.onnx.ml"}
    assert known >= set(REWRITERS)


def test_a_model_without_them_stays_as_it_is() -> None:
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[N] x) => (float[N] y) { y = Relu (x) }'
    )
    form = ir.from_proto(model)
    rewrite_classical(form)
    assert ir.to_proto(form).SerializeToString() == ir.to_proto(ir.from_proto(model)).SerializeToString()


def test_the_standard_domain_is_imported_where_it_was_not() -> None:
    form = ir.from_proto(model_of("Scaler", offset=[1.0, 2.0], scale=[3.0, 4.0]))
    del form.opset_imports[""]
    rewrite_classical(form)
    assert form.opset_imports[""] == 18
    assert {node.domain for node in form.graph} == {""}
    assert form.graph.outputs[0].dtype == ir.DataType.FLOAT


def test_nodes_in_branches_are_written_out() -> None:
    scaled = "y = ai.onnx.ml.Scaler <offset = [1.0, 2.0], scale = [3.0, 4.0]> (x)"
    model = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 3]> g (float[N, 2] x, bool c) => (float[N, 2] z)
        {{ z = If (c) <then_branch = a () => (float[N, 2] y) {{ {scaled} }},
                       else_branch = b () => (float[N, 2] w) {{ w = Relu (x) }}> }}"""
    )
    form = ir.from_proto(model)
    rewrite_classical(form)
    nodes = list(ir.traversal.RecursiveGraphIterator(form.graph))
    assert len(nodes) > 2
    assert {node.domain for node in nodes} == {""}
