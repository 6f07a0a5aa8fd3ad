"""What operators make of values that are cut along the sequence, where tensor parallelism's rules say something else.

A rank may compute its own queries with the keys and values of all ranks, and the loss of its own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from onward.graph.fusion.cross_entropy import FUSED_LOSS
from onward.graph.fusion.rewriting import DOMAIN as FUSED
from onward.plan.context.convolutions import Halo, halo_of
from onward.plan.context.ranges import TokenCut, chunk_size
from onward.plan.horizontal.cuts import (
    Assignment,
    CannotShardError,
    Edit,
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
        halo: what a convolution reads next to a rank's own tokens.
    """

    assignment: Assignment
    attention: tuple[TokenCut, TokenCut | None] | None = None
    mean: tuple[int, int] | None = None
    halo: Halo | None = None


Cuts = Mapping[int, TokenCut]


def cut_node(context: NodeContext, inputs: Cuts, outputs: Cuts, size: int) -> CutNode:
    """Completes the cuts of a node's operands, all of them `TokenCut`s.

    Raises:
        CannotShardError: it needs an operand in full.
    """
    node = context.node
    own = _RULES.get((node.domain, node.op_type))
    found = (
        CutNode(assignment=apply_rule(context, inputs, outputs)) if own is None else own(context, inputs, outputs, size)
    )
    found = _with_rows(context, found, inputs, outputs, size)
    for edit in found.assignment.edits:
        is_dropout = isinstance(edit, Replace) and edit.op_type == "Dropout"
        is_size = isinstance(edit, SetEntry) and isinstance(edit.target, int)
        if not (is_dropout or is_size or (isinstance(edit, WeighMean) and found.assignment.partial)):
            raise CannotShardError(f"{context.name} needs the full sequence")
    return found


SCALING = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})
"""Operators that make one token several rows, or several tokens one."""


def _with_rows(context: NodeContext, found: CutNode, inputs: Cuts, outputs: Cuts, size: int) -> CutNode:
    """The cuts that tensor parallelism's rules found, with the rows of tokens of those that were given.

    Raises:
        CannotShardError: the operands' tokens have different rows, or the chunks of their tokens end at other elements.
    """
    made = found.assignment
    if all(isinstance(cut, TokenCut) for cut in (*made.inputs.values(), *made.outputs.values())):
        return found
    if context.node.op_type in SCALING:
        given = inputs[0] if 0 in inputs else outputs[0]
        other = _in_proportion(context, given, made.outputs[0] if 0 in inputs else made.inputs[0], size)
        if 0 in inputs and 0 in outputs and outputs[0].rows != other.rows:
            raise CannotShardError(f"{context.name}: its tokens have different rows")
        own, result = (given, other) if 0 in inputs else (other, given)
        edits = tuple(replace(edit, cut=result) if isinstance(edit, SetEntry) else edit for edit in made.edits)
        return replace(found, assignment=replace(made, inputs={0: own}, outputs={0: result}, edits=edits))
    rows = {cut.rows for cut in (*inputs.values(), *outputs.values())}
    if len(rows) > 1:
        raise CannotShardError(f"{context.name}: the tokens of its operands have different rows")
    (count,) = rows
    edits = tuple(
        replace(edit, cut=_of_rows(edit.cut, count)) if isinstance(edit, SetEntry | WeighMean) and edit.cut else edit
        for edit in made.edits
    )
    assignment = replace(
        made,
        inputs={index: _of_rows(cut, count) for index, cut in made.inputs.items()},
        outputs={index: _of_rows(cut, count) for index, cut in made.outputs.items()},
        edits=edits,
    )
    return replace(found, assignment=assignment)


def _of_rows(cut: Sharding, rows: int) -> TokenCut:
    if any(block % rows for block in cut.blocks):
        raise CannotShardError(f"blocks of {', '.join(map(str, cut.blocks))} are not tokens of {rows} rows")
    return TokenCut(cut.axis, cut.blocks, cut.parts, rows)


def _in_proportion(context: NodeContext, cut: TokenCut, other: Sharding, size: int) -> TokenCut:
    """The cut of a value with more or fewer elements a token, so that a rank's part has the same of both.

    Raises:
        CannotShardError: several tokens become one, and chunks of the many end inside of one.
    """
    first = next(iter(zip(cut.blocks, other.blocks, strict=False)))
    rows, rest = divmod(cut.rows * first[1], first[0])
    made = _of_rows(other, 1 if rest or not rows else rows)
    for before, after in zip(cut.blocks, other.blocks, strict=False):
        ends = chunk_size(before // cut.rows, size) * cut.rows, chunk_size(after // made.rows, size) * made.rows
        if ends[0] * after != ends[1] * before:
            raise CannotShardError(f"{context.name}: {before} tokens and {after} rows are not cut at the same places")
    return made


def _attention(context: NodeContext, inputs: Cuts, outputs: Cuts, size: int) -> CutNode:
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
                found[index] = cut.along(len(shape) - 2)
    for index, wanted in inputs.items():
        if found.get(index) != wanted:
            raise CannotShardError(f"{context.name}: its mask is cut along its keys")
    return CutNode(assignment=Assignment(inputs=found, outputs={0: cut}), attention=(cut, keys))


def _cross_entropy(context: NodeContext, inputs: Cuts, outputs: Cuts, size: int) -> CutNode:
    """The loss of a rank's own tokens; the classes are not cut."""
    is_fused = context.node.op_type == FUSED_LOSS
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
        merged = through_reshape(cut, scores, (*count, scores[-1]))
        if merged is None or merged.axis != 0:
            raise CannotShardError(f"{context.name} is cut along its features")
        rows = _in_proportion(context, cut, merged, size)
        found |= {labels: rows, 3: rows} if context.has_input(3) else {labels: rows}
    else:
        if cut.axis == 1:
            raise CannotShardError(f"{context.name} is cut along its classes")
        found[labels] = cut.along(cut.axis and cut.axis - 1)
    if any(found.get(index, wanted) != wanted for index, wanted in inputs.items()):
        raise CannotShardError(f"{context.name}: its scores and labels are cut in different ways")
    if 4 in inputs:
        found[4] = inputs[4]
    if reduction == "none":
        return CutNode(assignment=Assignment(inputs=found, outputs={0: found[labels]}))
    mean = (labels, weights) if reduction == "mean" else None
    return CutNode(assignment=Assignment(inputs=found, partial=True), mean=mean)


def _slice(context: NodeContext, inputs: Cuts, outputs: Cuts, size: int) -> CutNode:
    """A cut sequence without its last elements, which are the last of the rank that has them."""
    cut = inputs.get(0)
    if cut is None or len(cut.blocks) > 1 or context.shape(0)[cut.axis] == context.result()[cut.axis]:
        plain = apply_rule(context, inputs, outputs)
        if plain.counts and cut is not None:  # every second token, or the like
            result = _in_proportion(context, cut, plain.outputs[0], size)
            return CutNode(assignment=replace(plain, inputs={0: cut}, outputs={0: result}))
        return CutNode(assignment=plain)
    length, kept, first = context.shape(0)[cut.axis], context.result()[cut.axis], context.numbers(1)
    ends, axes = context.numbers(2), context.numbers(3) if context.has_input(3) else None
    if context.version < 10 or first is None or ends is None or (context.has_input(3) and axes is None):
        raise CannotShardError(f"{context.name} takes part of the sequence")
    steps = context.numbers(4) if context.has_input(4) else (1,) * len(first)
    places = [int(a) % len(context.shape(0)) for a in axes] if axes is not None else list(range(len(first)))
    place = places.index(cut.axis)
    is_tail = steps is not None and steps[place] == 1 and slice(first[place], None).indices(length)[0] == 0
    if not is_tail or cut.rows > 1 or chunk_size(length, size) != chunk_size(kept, size):
        raise CannotShardError(f"{context.name} takes part of the sequence")
    short = TokenCut(cut.axis, (kept,))
    edits: tuple[Edit, ...] = (SetEntry(2, place, short, len(places)),)
    return CutNode(assignment=Assignment(inputs={0: cut}, outputs={0: short}, edits=edits))


def _reshape(context: NodeContext, inputs: Cuts, outputs: Cuts, size: int) -> CutNode:
    """As tensor parallelism, with the size of the cut axis always written."""
    found = apply_rule(context, inputs, outputs)
    edits = tuple(replace(edit, cut=found.outputs[0]) if isinstance(edit, SetEntry) else edit for edit in found.edits)
    return CutNode(assignment=replace(found, edits=edits))


def _of_tokens(context: NodeContext, inputs: Cuts, outputs: Cuts, size: int) -> CutNode:
    """A rank's own tokens, each with its own choice: any axis but the last, in every operand of that size.

    Of a mixture of slots, the first axis are the experts.
    """
    last = len(context.shape(0)) - 1
    if context.node.op_type == "TopK" and context.axis("axis", -1, last + 1) != last:
        raise CannotShardError(f"{context.name} compares tokens")
    is_routed = context.node.op_type != "TopK" and context.has_input(1)
    operands, first = (0, 1, 2) if is_routed else (0,), int(context.node.op_type == "Experts" and not is_routed)
    axes = range(first, last)
    links = [Link(dict.fromkeys(operands, axis), dict.fromkeys(context.outputs(), axis)) for axis in axes]
    return CutNode(assignment=follow(links, context, inputs, outputs))


def _convolution(context: NodeContext, inputs: Cuts, outputs: Cuts, size: int) -> CutNode:
    """A rank's own tokens, with those of other ranks next to them."""
    cut = inputs.get(0) or outputs.get(0)
    if cut is None or cut.axis < 2 or set(inputs) - {0}:
        return CutNode(assignment=apply_rule(context, inputs, outputs))
    halo = halo_of(context, cut.axis)
    if inputs.get(0, cut) != cut or outputs.get(0, cut) != cut:
        raise CannotShardError(f"{context.name}: its operand and its result are cut in different ways")
    made = Assignment(inputs={0: cut}, outputs={0: cut})
    if not halo.before and not halo.after:
        return CutNode(assignment=made)
    if len(cut.blocks) > 1 or cut.rows > 1:
        raise CannotShardError(f"{context.name}: the axis that it convolves holds several sequences")
    if max(halo.before, halo.after) > chunk_size(cut.blocks[0], size):
        raise CannotShardError(f"{context.name} reaches further than the tokens of the ranks next to it")
    return CutNode(assignment=made, halo=halo)


OwnRule = Callable[[NodeContext, Cuts, Cuts, int], CutNode]

_RULES: Mapping[tuple[str, str], OwnRule] = {
    (FUSED, "Attention"): _attention,
    (FUSED, FUSED_LOSS): _cross_entropy,
    ("", "SoftmaxCrossEntropyLoss"): _cross_entropy,
    ("", "Slice"): _slice,
    ("", "Reshape"): _reshape,
    ("", "Conv"): _convolution,
    ("", "TopK"): _of_tokens,
    (FUSED, "Experts"): _of_tokens,
}
