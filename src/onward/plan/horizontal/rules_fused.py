"""Rules of the operators of `onward.fused`, by which fusion replaces several of the user's nodes."""

from __future__ import annotations

from onward.graph.fusion.rewriting import DOMAIN
from onward.plan.horizontal.cuts import (
    Assignment,
    CannotShardError,
    Known,
    Link,
    NodeContext,
    Replace,
    TakeInputs,
    broadcast_links,
    follow,
)
from onward.plan.horizontal.rules import rule
from onward.plan.horizontal.rules_elementwise import elementwise, normalization_of_last_axes
from onward.plan.horizontal.rules_linear import attention
from onward.plan.shards import Sharding

rule("Gelu", "Swish", "SwiGLU", domains=(DOMAIN,))(elementwise)
rule("LayerNormalization", "RMSNormalization", domains=(DOMAIN,))(normalization_of_last_axes)


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


@rule("LinearCrossEntropy", domains=(DOMAIN,))
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
