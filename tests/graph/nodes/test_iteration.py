"""All nodes of a graph, against onnx-ir's iterator."""

from __future__ import annotations

import onnx_ir as ir

from onward.graph.nodes.iteration import every_node

MODEL = """
<ir_version: 8, opset_import: ["": 18]>
g (float[n] x, bool c) => (float[n] y) {
  a = Relu(x)
  y = If(c) <
    then_branch = t () => (float[n] u) {
      b = Tanh(a)
      u = If(c) <
        then_branch = tt () => (float[n] v) { v = Neg(b) },
        else_branch = te () => (float[n] w) { w = Abs(b) }
      >
    },
    else_branch = e () => (float[n] z) { z = Sin(a) }
  >
}
"""


def test_nodes_come_in_the_order_of_onnx_ir() -> None:
    graph = ir.from_onnx_text(MODEL).graph
    found = list(every_node(graph))
    assert [node.op_type for node in found] == ["Relu", "If", "Tanh", "If", "Neg", "Abs", "Sin"]
    assert found == list(ir.traversal.RecursiveGraphIterator(graph))


def test_graphs_in_a_list_are_visited() -> None:
    graph = ir.from_onnx_text(MODEL).graph
    branches = [attribute.as_graph() for attribute in list(graph)[1].attributes.values()]
    several = ir.Node("custom", "Several", [], [ir.Attr("bodies", ir.AttributeType.GRAPHS, branches)])
    holder = ir.Graph([], several.outputs, nodes=[several])
    assert [node.op_type for node in every_node(holder)] == ["Several", "Tanh", "If", "Neg", "Abs", "Sin"]
