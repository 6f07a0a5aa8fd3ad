"""What mixes the positions of a model in which no sequence is found, by module, for the message that says so."""

from __future__ import annotations

import onnx_ir as ir

from onward.graph.nodes.provenance import module_scope
from onward.graph.nodes.structure import label
from onward.graph.operators import Fact, has_fact
from onward.plan.context.sequences import attended_lengths
from onward.plan.horizontal.regions import PartitioningContext

_STEPS, _WINDOWS = "where each step needs the one before it", "which mixes neighbouring positions"
_MIXING = {
    **dict.fromkeys(("Scan", "Loop", "CumSum", "LinearAttention"), _STEPS),
    **dict.fromkeys(("MaxPool", "AveragePool"), _WINDOWS),
}
_MOST_NAMED = 4


def how_positions_meet(op_type: str) -> str | None:
    """By what an operator mixes positions of a sequence, other than attention, in words; None: it does not."""
    if has_fact(op_type, Fact.RECURRENT):
        return _STEPS
    return _WINDOWS if has_fact(op_type, Fact.CONVOLUTION) else _MIXING.get(op_type)


def why_no_sequence(partitioning: PartitioningContext, size: int) -> str:
    """The reason, in words that follow "but "."""
    least = 2 * size
    lengths = attended_lengths(partitioning)
    if lengths:
        name, longest = max(lengths, key=lambda one: one[1])
        return (
            f"each rank needs two chunks of a sequence, and the longest that the model attends to, in {name}, has "
            f"{longest} tokens; {size} ranks need at least {least}"
        )
    found: dict[str, str] = {}
    steps = _taken_one_by_one(partitioning, least)
    for node in partitioning.nodes:
        if str(node.outputs[0].name) not in partitioning.facts.from_inputs:
            continue
        why = how_positions_meet(node.op_type)
        if why is not None:
            found.setdefault(_shown(node, node.op_type), why)
        elif node in steps:
            found.setdefault(_shown(node, "a loop over positions"), _STEPS)
    start = (
        f"the model has neither attention over at least {least} tokens nor a convolution of stride 1 that keeps their "
        "number and reads no further than the next chunk of a rank, by which sequences are found"
    )
    if not found:
        return start
    named = [f"{name}, {why}" for name, why in list(found.items())[:_MOST_NAMED]]
    more = f"; and by {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return f"{start}. It mixes positions by {'; '.join(named)}{more}"


def _shown(node: ir.Node, what: str) -> str:
    scope = module_scope(node)
    return f"{scope!r} ({what})" if scope else f"{label(node)} ({what})" if what != node.op_type else label(node)


def _taken_one_by_one(partitioning: PartitioningContext, least: int) -> set[ir.Node]:
    """Nodes that take one element of an axis, of which so many others take theirs; the first of each axis."""
    shapes = partitioning.facts.shapes
    found: dict[tuple[ir.Value, int], list[ir.Node]] = {}
    for node in partitioning.nodes:
        if node.op_type != "Gather" or shapes.get(str(getattr(node.inputs[1], "name", ""))) != ():
            continue
        value = node.inputs[0]
        while value is not None and (slicing := value.producer()) is not None and slicing.op_type == "Slice":
            before = slicing.inputs[0]
            if before is None or shapes.get(str(before.name)) != shapes.get(str(value.name)):
                break
            value = before  # `x[:, t]` takes all of the first axis before one element of the second
        if value is not None:
            axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
            found.setdefault((value, axis), []).append(node)
    return {nodes[0] for nodes in found.values() if len(nodes) >= least}
