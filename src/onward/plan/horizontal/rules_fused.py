"""Rules of the operators of `onward.fused`, by which fusion replaces several of the user's nodes."""

from __future__ import annotations

from onward.graph.fusion.cross_entropy import FUSED_LOSS
from onward.graph.fusion.rewriting import DOMAIN
from onward.plan.horizontal.cuts import (
    Assignment,
    CannotShardError,
    Known,
    Link,
    NodeContext,
    Replace,
    SetAttribute,
    TakeInputs,
    broadcast_links,
    follow,
)
from onward.plan.horizontal.rules import rule
from onward.plan.horizontal.rules_elementwise import elementwise, group_normalization, normalization_of_last_axes
from onward.plan.horizontal.rules_linear import attention
from onward.plan.shards import Sharding

rule("Gelu", "Swish", "SwiGLU", "Softplus", "NanToNum", "StopGradient", domains=(DOMAIN,))(elementwise)
rule("LayerNormalization", "RMSNormalization", domains=(DOMAIN,))(normalization_of_last_axes)
rule("GroupNormalization", domains=(DOMAIN,))(group_normalization)


@rule("Linear", domains=(DOMAIN,))
def linear(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Rows and columns are kept; the axis in common is summed over, and the bias added once, after that."""
    last = len(context.result()) - 1
    column, row = (0, 1) if context.attribute("rows_are_outputs", 0) else (1, 0)
    links = [Link({1: column, 2: 0}, {0: last}), Link({0: last, 1: row}, {}, partial=True, bias=(2, last))]
    links += [Link({0: axis}, {0: axis}) for axis in range(last)]
    return follow(links, context, inputs, outputs)


@rule("RotaryEmbedding", domains=(DOMAIN,))
def rotary_embedding(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Any axis but the last, whose halves are turned; the tables broadcast."""
    last = len(context.result()) - 1
    links = [link for link in broadcast_links(context, [0, 1, 2]) if link.outputs[0] != last]
    return follow(links, context, inputs, outputs, "features")


@rule("Attention", domains=(DOMAIN,))
def fused_attention(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Whole heads, in masks too; with dropout inside, the ranks draw different numbers."""
    found = attention(context, {i: cut for i, cut in inputs.items() if i < 4}, outputs)
    heads = context.shape(0)[1]
    cuts = {i: cut for i, cut in found.inputs.items() if i < 4}
    if context.has_input(4):
        seen = context.shape(4)
        if len(seen) >= 3 and seen[-3] == heads:
            cuts[4] = Sharding(len(seen) - 3, (heads,))
    edits = (Replace("Attention", cuts[0]),) if context.attribute("dropout_ratio", 0.0) > 0 else ()
    return Assignment(inputs=cuts, outputs=found.outputs, counts=found.counts, edits=edits)


@rule("VisibleRows", "OpenedMask", domains=(DOMAIN,))
def mask_rows(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Any axis but those of queries and keys."""
    links = [Link({0: axis}, {0: axis}) for axis in range(len(context.result()) - 2)]
    return follow(links, context, inputs, outputs)


@rule(FUSED_LOSS, domains=(DOMAIN,))
def linear_cross_entropy(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """The classes: the loss is taken of each rank's own scores, which the graph still has."""
    axes = {1: 0 if context.attribute("rows_are_classes", 1) else 1, 3: 1, 6: 0}
    if context.has_input(4):
        axes[4] = len(context.shape(4)) - 1
    blocks = {cut.blocks for cut in inputs.values()}
    fits = all(axes.get(index) == cut.axis for index, cut in inputs.items())
    if outputs or not fits or len(blocks) != 1 or len(next(iter(blocks))) != 1:
        raise CannotShardError(f"{context.name} can be sharded by classes only")
    (own,) = blocks
    cuts = {index: Sharding(axis, own) for index, axis in axes.items() if context.has_input(index)}
    edits = (TakeInputs((3, 2, 5), ("rows_are_classes",)), Replace("ShardedCrossEntropy", cuts[3]))
    return Assignment(inputs=cuts, gathers=True, edits=edits)


@rule("Experts", domains=(DOMAIN,))
def experts(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """The hidden features of all experts at once, or the tokens with their choices, or an axis of their slots."""
    if outputs or min(inputs, default=0) < 3:
        operands, first = ((0, 1, 2), 0) if context.has_input(1) else ((0,), 1)
        links = [Link(dict.fromkeys(operands, axis), {0: axis}) for axis in range(first, len(context.result()) - 1)]
        return follow(links, context, inputs, outputs, "features of a token")
    gated, count = context.attribute("gated"), len(context.node.inputs) - 3
    layers = 3 if gated == 1 else 2
    each = count // (layers * (1 + context.attribute("is_biased")))
    pairs = 2 if gated == 3 else 1  # gates and values alternate
    axes: dict[int, tuple[int, int, int]] = {}  # of the hidden features, how often a block is repeated, and how wide
    for index in range(3, 3 + count):
        column, rank = (index - 3) // each, len(context.shape(index))
        is_down, is_bias = column % layers == layers - 1, column >= layers
        if is_bias and is_down:
            continue
        side = 0 if is_bias or is_down != bool(context.attribute("rows_are_outputs")) else 1
        axis = rank - (1 if is_bias else 2) + (0 if is_bias else side)
        axes[index] = (axis, 1 if is_down or gated != 2 else 2, 1 if is_down else pairs)
    known = set()
    for index, cut in inputs.items():
        axis, times, width = axes.get(index, (-1, 1, 1))
        half = cut.blocks[: len(cut.blocks) // times]
        if axis != cut.axis:
            raise CannotShardError(f"{context.name} can be sharded by the hidden features of its experts only")
        if half * times != cut.blocks:
            size = sum(cut.blocks) // times
            raise CannotShardError(f"{context.name} needs gates and values sharded alike", (size,) * times)
        if any(size % width for size in half):
            raise CannotShardError(f"{context.name} needs each gate sharded with its value")
        known.add(tuple(size // width for size in half))
    if len(known) != 1:
        raise CannotShardError(f"{context.name}: its operands are sharded into different blocks")
    (blocks,) = known
    cuts = {
        index: Sharding(axis, tuple(size * width for size in blocks) * times)
        for index, (axis, times, width) in axes.items()
    }
    return Assignment(inputs=cuts, partial=True)


@rule("DequantizeNBits", domains=(DOMAIN,))
def dequantize_blocks(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Rows, or full blocks of columns: packed numbers, scales and zero points are sharded in proportion."""
    result, stored = context.result(), [index for index in (0, 1, 2) if context.has_input(index)]
    shapes = {index: context.shape(index) for index in stored}
    first, cut = next(iter((outputs or inputs).items()))
    axis, full = cut.axis, cut.blocks
    if axis and (context.has_input(3) or any(len(shape) < 2 for shape in shapes.values())):
        raise CannotShardError(f"{context.name} has one row of scales, or blocks in another order")
    if axis and shapes[0][1] * context.attribute("block_size") != result[1]:
        raise CannotShardError(f"{context.name}: the last block of a row is not full")
    if not outputs:
        full = tuple(size * result[axis] // shapes[first][axis] for size in full)
    cuts = {}
    for index, shape in shapes.items():
        if any(size * shape[axis] % result[axis] for size in full):
            raise CannotShardError(f"{context.name}: a shard would end within a block")
        cuts[index] = Sharding(axis, tuple(size * shape[axis] // result[axis] for size in full))
    if any(cuts.get(index) != own for index, own in inputs.items()):
        raise CannotShardError(f"{context.name}: its operands are sharded into different blocks")
    counts = tuple((size, f"blocks of {context.name}") for own in cuts.values() for size in own.blocks)
    edits = (SetAttribute("columns", Sharding(0, full)),) if axis else ()
    return Assignment(inputs=cuts, outputs={0: Sharding(axis, full)}, counts=counts, edits=edits)


rule("ScaleGradient", domains=(DOMAIN,))(elementwise)


@rule("QuantizeLinear", "DequantizeLinear")
def quantize(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Any axis; scales and zero points of channels are sharded like the channels."""
    if context.attribute("block_size", 0):
        raise CannotShardError(f"{context.name} quantizes in blocks")
    rank, channels = len(context.result()), context.axis("axis", 1, max(len(context.result()), 2))
    own = {index: 0 for index in (1, 2) if context.has_input(index) and len(context.shape(index)) == 1}
    own = {index: 0 for index in own if context.shape(index)[0] > 1}
    links = [Link({0: axis, **(own if axis == channels else {})}, {0: axis}) for axis in range(rank)]
    return follow(links, context, inputs, outputs)


@rule("MovingScale", domains=(DOMAIN,))
def moving_scale(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """The channels; of a range that crosses ranks, the largest of all of them is taken."""
    channels, cut = context.attribute("axis", -1), inputs.get(0)
    if cut is not None and cut.axis != channels and not outputs:
        return Assignment(inputs={0: cut}, gathers=True, edits=(Replace("MovingScaleOfShards", cut),))
    links = [] if channels < 0 else [Link({0: channels, 1: 0}, {0: 0})]
    return follow(links, context, inputs, outputs, "elements of one range")
