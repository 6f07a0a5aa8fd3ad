"""A value is gathered once, and a part of it taken once, whoever reads them; what was full is not gathered again."""

from __future__ import annotations

import onnx_ir as ir

from onward.graph.training_graph import make_training_graph
from onward.plan.context.editing import ContextEditor
from onward.plan.context.ranges import TokenCut
from onward.plan.context.rules import CutNode
from onward.plan.horizontal.cuts import Assignment
from onward.plan.horizontal.regions import PartitioningContext
from tests.plan.staged_models import Sketch

TOKENS = TokenCut(1, (8,))


def test_parts_and_full_values_are_made_once() -> None:
    sketch = Sketch(seed=1)
    x = sketch.input("x", [2, 8, 4], ir.DataType.FLOAT)
    first = sketch.node("MatMul", "first", x, sketch.weight("weight", 4, 4))
    graph = make_training_graph(sketch.model(sketch.node("Tanh", "second", first)))
    editor = ContextEditor(PartitioningContext(graph, {"x": (2, 8, 4), "first": (2, 8, 4)}), 2)
    product, tanh = list(graph.model.graph)
    value = product.outputs[0]
    part = editor.part(value, TOKENS, tanh)
    assert editor.part(value, TOKENS, tanh) is part
    assert editor.gathered(part, tanh) is value
    assert (part.name, editor.cuts[part], editor.shapes[str(part.name)]) == ("first/own", TOKENS, (2, 8, 4))
    editor.set_cut(value, TOKENS)
    full = editor.gathered(value, tanh)
    assert editor.gathered(value, tanh) is full
    editor.gather(tanh, 0)
    assert tanh.inputs[0] is full
    assert [node.op_type for node in graph.model.graph] == ["MatMul", "ContextPart", "ContextGather", "Tanh"]
    editor.add_up(product, CutNode(assignment=Assignment(partial=True)))
    assert (value.name, editor.shapes["first/partial"]) == ("first/partial", (2, 8, 4))
