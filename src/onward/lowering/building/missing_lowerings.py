"""What of a graph cannot be lowered, and why, as far as that is known."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onward.lowering.building.node_outputs import label_of
from onward.lowering.ledger import why_refused
from onward.lowering.registry import find_lowering


def find_unsupported(graph: ir.Graph, opsets: Mapping[str, int]) -> list[str]:
    """One line per node, nested graphs included, that no lowering covers."""
    lines = []
    for node in ir.traversal.RecursiveGraphIterator(graph):
        version = opsets.get(node.domain)
        if version is None or find_lowering(node.domain, node.op_type, version) is None:
            at = "an opset the model does not import" if version is None else f"opset {version}"
            reason = why_refused(node.domain, node.op_type)
            because = "" if reason is None else f": {reason}"
            lines.append(f"{label_of(node)} of domain {node.domain or 'ai.onnx'!r}, {at}{because}")
    return lines
