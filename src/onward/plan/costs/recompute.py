"""What is recomputed for the backward pass instead of being kept: which attention, and which segments for a budget.

Recompute of entire layers is Chen et al., 2016 (arXiv 1604.06174); of attention alone, Korthikanti et al., 2022 (arXiv
2205.05198, section 5): its scores are large and cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import onnx_ir as ir

from onward.errors import ParametersError
from onward.graph.cuts import reads
from onward.parameters.distributed import Recompute
from onward.plan.costs.costs import NodeCost
from onward.plan.roles import node_id

FUSED_DOMAIN = "onward.fused"

_BETWEEN = frozenset({"Mul", "Div", "Add", "Sub", "Where", "Cast", "Reshape", "Identity", "Dropout", "IsNaN",
                      "Transpose", "Squeeze", "Unsqueeze", "Clip", "Tanh", "Concat", "Slice"})  # fmt: skip
_MOST_STEPS = 16


def find_attention(graph: ir.Graph, weights: Collection[str]) -> list[frozenset[ir.Node]]:
    """The attentions of a graph that keep their scores for the backward pass, each from score to value product.

    Those that fusion made one node of keep none (Dao et al., 2022), unless there is dropout on the probabilities,
    which not every kernel can do, or a bias of the scores that trains, for which no kernel has a gradient.

    Args:
        graph: prepared for lowering.
        weights: that train.
    """
    trained = frozenset(weights)
    order = {node: place for place, node in enumerate(graph)}
    found = []
    for node in graph:
        if node.op_type == "Attention" and _keeps_scores(node, trained):
            found.append(frozenset({node}))
        elif node.op_type == "Softmax" and node.domain == "":
            core = _core_around(node, order)
            if core:
                found.append(core)
    return found


def count_fused_attention(graph: ir.Graph, weights: Collection[str]) -> int:
    """How many attentions are one node that keeps no scores, where these weights train."""
    trained = frozenset(weights)
    return sum(node.op_type == "Attention" and not _keeps_scores(node, trained) for node in graph)


def check_recompute(graph: ir.Graph, recompute: Recompute, weights: Collection[str]) -> str | None:
    """Looks whether there is what is to be recomputed, in the entire graph; what to report to the user, if anything.

    Args:
        graph: prepared for lowering.
        recompute: what is asked for.
        weights: that train.

    Raises:
        ParametersError: `attention` is asked for, and the model has none.
    """
    if not recompute.attention or recompute.segments or find_attention(graph, weights):
        return None
    fused = count_fused_attention(graph, weights)
    if not fused:
        raise ParametersError(
            "recompute.attention is true, but the model has no attention: no softmax between two matmuls of "
            "activations. Use recompute.segments or recompute.memory_budget instead."
        )
    return (
        f"recompute.attention: nothing to do. All {fused} attentions are computed by one kernel each, which keeps no "
        "scores (speed.fusions_off: [attention] would expand them again)."
    )


def _keeps_scores(node: ir.Node, weights: frozenset[str]) -> bool:
    if node.domain != FUSED_DOMAIN:
        return True
    ratio = node.attributes.get("dropout_ratio")
    if ratio is not None and ratio.as_float() > 0:
        return True
    mask = node.inputs[3] if len(node.inputs) > 3 else None
    return mask is not None and mask.dtype is not ir.DataType.BOOL and _depends_on(mask, weights)


def _depends_on(value: ir.Value, weights: frozenset[str]) -> bool:
    """Whether a value is computed from one of the weights."""
    found, stack = {value}, [value]
    while stack:
        one = stack.pop()
        if one.name in weights:
            return True
        node = one.producer()
        sources = [] if node is None else [source for source in node.inputs if source is not None]
        stack += [source for source in sources if source not in found]
        found.update(sources)
    return False


def _core_around(softmax: ir.Node, order: Mapping[ir.Node, int]) -> frozenset[ir.Node]:
    """Everything between the product before a softmax and the product after it, both included."""
    first = _nearest_product(softmax, lambda node: (v.producer() for v in node.inputs if v is not None))
    last = _nearest_product(softmax, lambda node: (user for v in node.outputs for user in v.consumers()))
    if first is None or last is None or first not in order or last not in order:
        return frozenset()
    below = _reach(first, lambda node: (user for v in node.outputs for user in v.consumers()), order, order[last])
    above = _reach(last, lambda node: (v.producer() for v in reads(node)), order, order[first])
    return frozenset(below & above)


def _nearest_product(start: ir.Node, neighbors: Callable[[ir.Node], Iterator[ir.Node | None]]) -> ir.Node | None:
    """The first product of two activations in a direction, over operators that leave scores what they are."""
    waiting = [start]
    for _ in range(_MOST_STEPS):
        following: list[ir.Node] = []
        for node in waiting:
            for other in neighbors(node):
                if other is None:
                    continue
                if other.op_type in ("MatMul", "Einsum") and not any(
                    v is None or v.const_value is not None for v in other.inputs
                ):
                    return other
                if other.op_type in _BETWEEN:
                    following.append(other)
        waiting = following
    return None


def _reach(
    start: ir.Node,
    neighbors: Callable[[ir.Node], Iterator[ir.Node | None]],
    order: Mapping[ir.Node, int],
    bound: int,
) -> set[ir.Node]:
    """The nodes that one leads to, no further in the graph than a bound."""
    low, high = sorted((order[start], bound))
    found, stack = {start}, [start]
    while stack:
        for other in neighbors(stack.pop()):
            if other is not None and other not in found and low <= order.get(other, -1) <= high:
                found.add(other)
                stack.append(other)
    return found


def split_at_attention(
    nodes: Sequence[ir.Node], attentions: Sequence[frozenset[ir.Node]]
) -> tuple[list[list[ir.Node]], set[int]]:
    """Cuts the nodes of a segment before and after each attention in it; the parts, and which of them are attention.

    Between the first and the last node of an attention may stand others: those that need nothing of it go before it,
    those that do, behind.
    """
    parts, special = [list(nodes)], set[int]()
    for core in attentions:
        rest = parts[-1]
        inside = [node for node in rest if node in core]
        if len(inside) != len(core):
            continue
        last = rest.index(inside[-1])
        behind: list[ir.Node] = []
        depends = set(core)
        for node in rest[: last + 1]:
            if node not in core and any(value.producer() in depends for value in reads(node)):
                depends.add(node)
                behind.append(node)
        before = [node for node in rest[: last + 1] if node not in depends]
        parts[-1:] = [before, inside, behind + rest[last + 1 :]]
        special.add(len(parts) - 2)
    return parts, special


def choose_for_budget(
    parts: Sequence[Sequence[ir.Node]], candidates: Sequence[int], share: float, costs: Mapping[str, NodeCost]
) -> frozenset[int]:
    """The segments to recompute so that at most a share of the activations is kept, at little cost.

    Taken one by one, those first that free most bytes for an operation; at the end those that turn out not to be
    needed are left out again. If even all of them keep more than the share, all are taken.

    Args:
        parts: the nodes of every segment.
        candidates: segments that may be recomputed.
        share: of the bytes that all segments keep.
        costs: of nodes, by the name of their first output; others count nothing.
    """
    freed, price = dict[int, float](), dict[int, float]()
    total = sum(_cost(node, costs).kept_bytes for part in parts for node in part)
    for index in candidates:
        own = set(parts[index])
        inner = [n for n in parts[index] if all(user in own for v in n.outputs for user in v.consumers())]
        freed[index] = sum(_cost(node, costs).kept_bytes for node in inner)
        price[index] = sum(_cost(node, costs).time.forward for node in parts[index]) + 1.0
    wanted, taken = (1.0 - share) * total, list[int]()
    for index in sorted(freed, key=lambda i: -freed[i] / price[i]):
        if freed[index] and sum(freed[i] for i in taken) < wanted:
            taken.append(index)
    for index in sorted(taken, key=lambda i: -price[i]):
        if sum(freed[i] for i in taken if i != index) >= wanted:
            taken.remove(index)
    return frozenset(taken)


def _cost(node: ir.Node, costs: Mapping[str, NodeCost]) -> NodeCost:
    return costs.get(node_id(node), NodeCost())
