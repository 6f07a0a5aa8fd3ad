"""Nodes that no lowering covers, those of nested graphs included, each with its name, domain and version."""

from __future__ import annotations

import onnx_ir as ir

from onward.lowering.building.missing_lowerings import find_unsupported


def test_every_node_without_a_lowering_is_listed() -> None:
    inner = ir.Graph([], [], nodes=[ir.Node("", "Frobnicate", [], name="deep")])
    branch = ir.Node("", "If", [None], [ir.AttrGraph("then_branch", inner)], name="choice")
    known, elsewhere = ir.Node("", "Relu", [None], name="fine"), ir.Node("nobody", "Relu", [None], name="foreign")
    graph = ir.Graph([], [], nodes=[known, branch, elsewhere])
    assert find_unsupported(graph, {"": 20}) == [
        "node 'deep' (Frobnicate) of domain 'ai.onnx', opset 20",
        "node 'foreign' (Relu) of domain 'nobody', an opset the model does not import",
    ]
