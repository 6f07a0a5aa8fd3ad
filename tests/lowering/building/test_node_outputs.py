"""What the builder asks of a node: labels, named outputs, element types."""

from __future__ import annotations

import onnx_ir as ir

from onward.lowering.building.node_outputs import is_float, label_of, last_named_output


def node(*outputs: str, name: str | None = None) -> ir.Node:
    return ir.node("Split", [], outputs=[ir.Value(name=one) for one in outputs], name=name)


def test_a_node_is_named_by_itself_by_its_output_or_not_at_all() -> None:
    assert label_of(node("y", name="n")).name == "n"
    assert label_of(node("y")).name == "y"
    assert label_of(node("")).name == "unnamed"
    assert label_of(ir.node("Split", [], num_outputs=0)).name == "unnamed"


def test_outputs_without_a_name_at_the_end_do_not_count() -> None:
    assert [last_named_output(node(*names)) for names in ((), ("",), ("a", ""), ("", "b"), ("", "b", ""))] == [
        0, 0, 1, 2, 2,
    ]  # fmt: skip


def test_floats() -> None:
    kinds = ir.DataType
    assert [is_float(one) for one in (kinds.BFLOAT16, kinds.FLOAT8E4M3FN, kinds.INT4, kinds.BOOL, kinds.UINT64)] == [
        True, True, False, False, False,
    ]  # fmt: skip
