"""The scores of a loss in the search of a layout: which nodes compute them, and what is kept of them.

A fused loss takes them chunk by chunk; tensor-parallel ranks that share the classes take the loss of all at once.
"""

from __future__ import annotations

import onnx_ir as ir

from onward.graph.cuts import reads
from onward.graph.fusion.cross_entropy import FUSED_LOSS
from onward.graph.operators import Fact, has_fact
from onward.graph.training_graph import TrainingGraph
from onward.plan.costs.costs import GraphCosts
from onward.plan.horizontal.planning import HorizontalPlan

_SCORES = {"SoftmaxCrossEntropyLoss": 0, FUSED_LOSS: 3}
"""Losses that keep a softmax -> which input they are taken of."""
_VIEWS = Fact.SAME_ELEMENTS | Fact.VIEW


def computed_nodes(graph: TrainingGraph, nodes: list[ir.Node], horizontal: HorizontalPlan) -> set[ir.Node]:
    """Nodes that training runs: what only a loss by chunks could read, its logits, is not there in full.

    Tensor-parallel ranks that share the classes take the loss of all logits at once.
    """
    if graph.loss_names is None:
        return set(nodes)
    needed, found = {graph.loss_names.loss}, set[ir.Node]()
    for node in reversed(nodes):
        if needed.isdisjoint(str(value.name) for value in node.outputs):
            continue
        found.add(node)
        is_chunked = node.op_type == FUSED_LOSS and node.outputs[0].name not in horizontal.edits
        read = node.inputs[:3] if is_chunked else reads(node)
        needed |= {str(value.name) for value in read if value is not None}
    return found


def reads_scores(node: ir.Node, computed: set[ir.Node]) -> bool:
    """Whether a fused loss is taken of scores that are computed anyway."""
    scores = node.inputs[3] if len(node.inputs) > 3 else None
    return scores is not None and scores.producer() in computed


def kept_by_loss(node: ir.Node, costs: GraphCosts) -> float:
    """Bytes of the softmax that a cross entropy keeps: as many as there are scores."""
    index = _SCORES.get(node.op_type)
    scores = None if index is None else node.inputs[index]
    return 0.0 if scores is None else costs.value_bytes.get(str(scores.name), 0.0)


def makers_of_scores(node: ir.Node) -> list[ir.Node]:
    """The node that computes what a loss is taken of, and those that give it another shape or type."""
    value, found = node.inputs[_SCORES[node.op_type]], list[ir.Node]()
    while value is not None and (maker := value.producer()) is not None:
        found.append(maker)
        value = maker.inputs[0] if maker.op_type == "Cast" or has_fact(maker.op_type, _VIEWS) else None
    return found
