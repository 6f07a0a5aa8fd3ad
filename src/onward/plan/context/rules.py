"""What operators make of values that are cut along the sequence, where tensor parallelism's rules say something else.

A rank may compute its own queries with the keys and values of all ranks, and the loss of its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from onward.graph.fusion.rewriting import DOMAIN as FUSED
from onward.plan.context.ranges import chunk_size
from onward.plan.horizontal.cuts import (
    Assignment,
    CannotShardError,
    Edit,
    Known,
    Link,
    NodeContext,
    Replace,
    SetEntry,
    WeighMean,
    follow,
)
from onward.plan.horizontal.rules import apply_rule
from onward.plan.horizontal.rules_movement import through_reshape
from onward.plan.shards import Sharding


@dataclass(frozen=True, kw_only=True)
class CutNode:
    """How a context rank computes a node.

    Attributes:
        assignment: what is cut and how.
        attention: cuts of queries, and of keys and values that the operator gathers itself.
        mean: inputs that hold the labels and the classes' weights of a loss that is a mean over labels.
    """

    assignment: Assignment
    attention: tuple[Sharding, Sharding | None] | None = None
    mean: tuple[int, int] | None = None


def cut_node(context: NodeContext, inputs: Known, outputs: Known, size: int) -> CutNode:
    """Completes the cuts of a node's operands.

    Raises:
        CannotShardError: it needs an operand in full.
    """
    node = context.node
    own = _RULES.get((node.domain, node.op_type))
    found = (
        CutNode(assignment=apply_rule(context, inputs, outputs)) if own is None else own(context, inputs, outputs, size)
    )
    if node.op_type in _SCALING:
        _check_scaled(context, found.assignment.inputs[0], found.assignment.outputs[0], size)
    for edit in found.assignment.edits:
        is_dropout = isinstance(edit, Replace) and edit.op_type == "Dropout"
        is_size = isinstance(edit, SetEntry) and isinstance(edit.target, int)
        if not (is_dropout or is_size or (isinstance(edit, WeighMean) and found.assignment.partial)):
            raise CannotShardError(f"{context.name} needs the full sequence")
    return found


_SCALING = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})
"""Operators that make one token several rows, or several tokens one."""


def _check_scaled(context: NodeContext, cut: Sharding, other: Sharding, size: int) -> None:
    """Whether a rank's part of one value has the elements of its part of another, whose blocks are in proportion.

    Raises:
        CannotShardError: the chunks end at other elements, since one of the lengths is not divisible.
    """
    for before, after in zip(cut.blocks, other.blocks, strict=False):
        if chunk_size(before, size) * after != chunk_size(after, size) * before:
            raise CannotShardError(f"{context.name}: {before} tokens and {after} rows are not cut at the same places")


def _attention(context: NodeContext, inputs: Known, outputs: Known, size: int) -> CutNode:
    """A rank's own queries; keys and values of all ranks, gathered where they are cut."""
    cut = inputs.get(0) or outputs.get(0)
    if cut is None or cut.axis != 2 or len(context.shape(0)) != 4:
        raise CannotShardError(f"{context.name} mixes the axis that is cut")
    if set(outputs) - {0}:
        raise CannotShardError(f"{context.name} gives more than its result")
    keys = inputs.get(1)
    if keys != inputs.get(2) or (keys is not None and keys.axis != 2):
        raise CannotShardError(f"{context.name}: its keys and values are cut in different ways")
    found = {0: cut}
    if keys is not None:
        found |= {1: keys, 2: keys}
    queries = context.shape(0)[2]
    for index in (3, 4):
        if context.has_input(index):
            shape = context.shape(index)
            if len(shape) > 1 and shape[-2] == queries > 1:
                found[index] = Sharding(len(shape) - 2, cut.blocks)
    for index, wanted in inputs.items():
        if found.get(index) != wanted:
            raise CannotShardError(f"{context.name}: its mask is cut along its keys")
    return CutNode(assignment=Assignment(inputs=found, outputs={0: cut}), attention=(cut, keys))


def _cross_entropy(context: NodeContext, inputs: Known, outputs: Known, size: int) -> CutNode:
    """The loss of a rank's own tokens; the classes are not cut."""
    is_fused = context.node.op_type == "LinearCrossEntropy"
    labels, weights = (2, 5) if is_fused else (1, 2)
    reduction = context.attribute("reduction", "mean")
    if set(inputs) - {0, 3, 4, labels} or (len(context.outputs()) > 1 and not is_fused):
        raise CannotShardError(f"{context.name} is cut along its classes")
    cut = inputs.get(0)
    if cut is None:
        raise CannotShardError(f"{context.name}: its scores are not cut")
    found = {0: cut}
    scores, count = context.shape(0), context.shape(labels)
    if is_fused:
        rows = through_reshape(cut, scores, (*count, scores[-1]))
        if rows is None or rows.axis != 0:
            raise CannotShardError(f"{context.name} is cut along its features")
        _check_scaled(context, cut, rows, size)
        found |= {labels: rows, 3: rows} if context.has_input(3) else {labels: rows}
    else:
        if cut.axis == 1:
            raise CannotShardError(f"{context.name} is cut along its classes")
        found[labels] = Sharding(cut.axis and cut.axis - 1, cut.blocks)
    if any(found.get(index, wanted) != wanted for index, wanted in inputs.items()):
        raise CannotShardError(f"{context.name}: its scores and labels are cut in different ways")
    if 4 in inputs:
        found[4] = inputs[4]
    if reduction == "none":
        return CutNode(assignment=Assignment(inputs=found, outputs={0: found[labels]}))
    mean = (labels, weights) if reduction == "mean" else None
    return CutNode(assignment=Assignment(inputs=found, partial=True), mean=mean)


def _slice(context: NodeContext, inputs: Known, outputs: Known, size: int) -> CutNode:
    """A cut sequence without its last elements, which are the last of the rank that has them."""
    cut = inputs.get(0)
    if cut is None or len(cut.blocks) > 1 or context.shape(0)[cut.axis] == context.result()[cut.axis]:
        plain = apply_rule(context, inputs, outputs)
        if plain.counts:  # every second token, or the like
            _check_scaled(context, plain.inputs[0], plain.outputs[0], size)
        return CutNode(assignment=plain)
    length, kept, first = context.shape(0)[cut.axis], context.result()[cut.axis], context.numbers(1)
    ends, axes = context.numbers(2), context.numbers(3) if context.has_input(3) else None
    if context.version < 10 or first is None or ends is None or (context.has_input(3) and axes is None):
        raise CannotShardError(f"{context.name} takes part of the sequence")
    steps = context.numbers(4) if context.has_input(4) else (1,) * len(first)
    places = [int(a) % len(context.shape(0)) for a in axes] if axes is not None else list(range(len(first)))
    place = places.index(cut.axis)
    is_tail = steps is not None and steps[place] == 1 and slice(first[place], None).indices(length)[0] == 0
    if not is_tail or chunk_size(length, size) != chunk_size(kept, size):
        raise CannotShardError(f"{context.name} takes part of the sequence")
    short = Sharding(cut.axis, (kept,))
    edits: tuple[Edit, ...] = (SetEntry(2, place, short, len(places)),)
    return CutNode(assignment=Assignment(inputs={0: cut}, outputs={0: short}, edits=edits))


def _reshape(context: NodeContext, inputs: Known, outputs: Known, size: int) -> CutNode:
    """As tensor parallelism, with the size of the cut axis always written."""
    found = apply_rule(context, inputs, outputs)
    edits = tuple(replace(edit, cut=found.outputs[0]) if isinstance(edit, SetEntry) else edit for edit in found.edits)
    return CutNode(assignment=replace(found, edits=edits))


def _of_tokens(context: NodeContext, inputs: Known, outputs: Known, size: int) -> CutNode:
    """A rank's own tokens, each with its own choice: any axis but the last, in every operand of that size."""
    last = len(context.shape(0)) - 1
    if context.node.op_type == "TopK" and context.axis("axis", -1, last + 1) != last:
        raise CannotShardError(f"{context.name} compares tokens")
    operands = (0,) if context.node.op_type == "TopK" else (0, 1, 2)
    links = [Link(dict.fromkeys(operands, axis), dict.fromkeys(context.outputs(), axis)) for axis in range(last)]
    return CutNode(assignment=follow(links, context, inputs, outputs))


OwnRule = Callable[[NodeContext, Known, Known, int], CutNode]

_RULES: Mapping[tuple[str, str], OwnRule] = {
    (FUSED, "Attention"): _attention,
    (FUSED, "LinearCrossEntropy"): _cross_entropy,
    ("", "SoftmaxCrossEntropyLoss"): _cross_entropy,
    ("", "Slice"): _slice,
    ("", "Reshape"): _reshape,
    ("", "TopK"): _of_tokens,
    (FUSED, "Experts"): _of_tokens,
}
