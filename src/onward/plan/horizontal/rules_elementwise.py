"""Rules of what works element by element, along vectors, or over windows: every axis that is not mixed may be cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onward.graph.operators import Fact, operators_with
from onward.plan.horizontal.cuts import (
    Assignment,
    CannotShardError,
    Known,
    Link,
    NodeContext,
    Replace,
    SetAttribute,
    SetEntry,
    WeighMean,
    broadcast_links,
    follow,
    units,
)
from onward.plan.horizontal.rules import rule
from onward.plan.shards import Sharding


@rule(*operators_with(Fact.UNARY | Fact.BROADCASTING))
@rule("FastGelu", "QuickGelu", "BiasGelu", "BiasAdd", domains=("com.microsoft",))
def elementwise(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Any axis of the result, in all operands that have it."""
    return follow(broadcast_links(context, range(len(context.node.inputs))), context, inputs, outputs)


@rule("CastLike")
def cast_like(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Any axis of the first operand; of the second, only the type matters."""
    like = {1: inputs[1]} if 1 in inputs else {}
    if 0 not in inputs and not outputs:
        return Assignment(inputs=like, gathers=True)
    found = follow(broadcast_links(context, [0]), context, _data(inputs), outputs)
    return Assignment(inputs={**found.inputs, **like}, outputs=found.outputs)


@rule("Clip")
def first_operand(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Any axis of the first operand; the others are numbers or types."""
    return follow(broadcast_links(context, [0]), context, inputs, outputs)


@rule("Dropout")
def dropout(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Any axis; the ranks then draw different numbers."""
    found = follow(broadcast_links(context, [0]), context, inputs, outputs)
    counts = tuple((block, f"parts of {context.name}") for block in found.inputs[0].blocks)
    return Assignment(
        inputs=found.inputs, outputs=found.outputs, counts=counts, edits=(Replace("Dropout", found.inputs[0]),)
    )


@rule("Softmax", "LogSoftmax")
def softmax(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Any other axis as it is; its own by reducing each row's maximum and sum. Before opset 13 more axes are one."""
    rank = len(context.result())
    old = context.version < 13
    axis = context.axis("axis", 1 if old else -1, rank)
    known = {**outputs, **inputs}
    cut = next(iter(known.values()))
    own = range(axis, rank) if old else [axis]
    links = broadcast_links(context, [0])
    found = follow(links, context, inputs, outputs)
    if cut.axis not in own:
        return found
    if old and axis != rank - 1:
        raise CannotShardError(f"{context.name} is over several axes at once")
    return Assignment(
        inputs=found.inputs, outputs=found.outputs, edits=(Replace(f"Sharded{context.node.op_type}", cut),)
    )


@rule("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
@rule("SimplifiedLayerNormalization", domains=("com.microsoft",))
def normalization_of_last_axes(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Any axis before those that are normalized; the last one where the ranks may reduce its statistics."""
    result = context.result()
    first = context.axis("axis", -1, len(result))
    if context.facts.norms_over_ranks and first == len(result) - 1 and _is_inner_norm(context):
        last = Link({0: first, **{i: 0 for i in (1, 2) if context.has_input(i)}}, {0: first})
        cut = next(iter({**outputs, **inputs}.values()))
        if all(last.inputs.get(i) == one.axis for i, one in inputs.items()) and all(
            one.axis == first for one in outputs.values()
        ):
            found = follow([last], context, inputs, outputs)
            kind = "Layer" if context.node.op_type.startswith("Layer") else "RMS"
            return replace(found, edits=(Replace(f"{kind}NormOverRanks", cut),))
    links = [Link({0: axis}, dict.fromkeys(context.outputs(), axis)) for axis in range(first)]
    return follow(links, context, inputs, outputs, "normalized axis")


def _is_inner_norm(context: NodeContext) -> bool:
    """Whether a norm stands alone between two layers, with parameters as wide as it is.

    Through the norms at the beginning of layers, what all layers add to would be cut, and with it every layer.
    """
    node, width = context.node, context.result()[-1]
    operands = [value for value in (node.inputs[0], *node.outputs) if value is not None]
    # CastLike may read it for its type alone.
    readers = [[use for use in value.uses() if (use.node.op_type, use.idx) != ("CastLike", 1)] for value in operands]
    return all(len(uses) == 1 for uses in readers) and all(
        context.shape(i) == (width,) for i in (1, 2) if context.has_input(i)
    )


@rule("LpNormalization", "Hardmax", "CumSum", "CumProd")
def along_one_axis(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Any axis but the one that the operator goes along."""
    rank = len(context.result())
    if context.node.op_type.startswith("Cum"):
        given = context.numbers(1)
        if given is None:
            raise CannotShardError(f"{context.name}: its axis depends on data")
        own = int(given[0]) % rank
    else:
        own = context.axis("axis", -1, rank)
    links = [link for link in broadcast_links(context, [0]) if link.outputs[0] != own]
    return follow(links, context, inputs, outputs)


@rule("Trilu")
def trilu(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Any axis but the two of the matrices."""
    rank = len(context.result())
    links = [link for link in broadcast_links(context, [0]) if link.outputs[0] < rank - 2]
    return follow(links, context, inputs, outputs)


@rule("BatchNormalization")
def batch_normalization(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """The channels, with weights and running statistics."""
    results = {o: 1 if o == 0 else 0 for o in context.outputs()}
    return follow([Link({0: 1, 1: 0, 2: 0, 3: 0, 4: 0}, results)], context, inputs, outputs, "batch and space")


@rule("InstanceNormalization")
def instance_normalization(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """The channels, with their weights."""
    return follow([Link({0: 1, 1: 0, 2: 0}, {0: 1}), Link({0: 0}, {0: 0})], context, inputs, outputs, "space")


@rule("GroupNormalization")
def group_normalization(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Whole groups of channels, with their weights: one a channel from opset 21 on, before one a group."""
    are_of_groups = context.node.domain == "" and context.version < 21
    channels, groups = context.shape(0)[1], int(context.attribute("num_groups"))
    cut = next(iter({**outputs, **inputs}.values()))
    found = follow([Link({0: 1} if are_of_groups else {0: 1, 1: 0, 2: 0}, {0: 1})], context, _data(inputs), outputs)
    count = units(cut.blocks, channels // groups)
    if count is None:
        raise CannotShardError(f"{context.name}: a group of channels would be split")
    of_groups = Sharding(0, tuple(block * groups // channels for block in cut.blocks))
    weights = {1: of_groups, 2: of_groups} if are_of_groups else {}
    return Assignment(
        inputs={**found.inputs, **weights},
        outputs=found.outputs,
        counts=((count, f"groups of channels of {context.name}"),),
        edits=(SetAttribute("num_groups", of_groups),),
    )


def _data(inputs: Known) -> Known:
    return {index: cut for index, cut in inputs.items() if index == 0}


@rule(
    "MaxPool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool",
    "AdaptiveAveragePool", "LRN",
)  # fmt: skip
def pooling(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """The channels; an index of the maximum would be one of the full tensor."""
    if len(context.outputs()) > 1:
        raise CannotShardError(f"{context.name} gives positions in the full tensor")
    links = [Link({0: 0}, {0: 0})]
    if context.node.op_type != "LRN":
        links.append(Link({0: 1}, {0: 1}))
    return follow(links, context, inputs, outputs, "window")


@rule("Pad")
def pad(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """The axes without padding; one that is padded before and cropped behind keeps its size, and yet is moved."""
    if context.has_input(3):
        raise CannotShardError(f"{context.name} pads chosen axes")
    rank = len(context.shape(0))
    pads = context.numbers(1) if context.version >= 11 else context.attribute("pads", context.attribute("paddings"))
    if pads is None:
        raise CannotShardError(f"{context.name}: how much it pads depends on data")
    axes = [a for a in range(rank) if pads[a] == pads[a + rank] == 0]
    return follow([Link({0: a}, {0: a}) for a in axes], context, inputs, outputs, "padded axis")


@rule("Resize", "Upsample")
def resizing(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """The axes that stay as they are; sizes that are given as numbers become the rank's."""
    rank = len(context.result())
    named = context.attribute("axes")
    places = list(range(rank)) if named is None else [int(axis) % rank for axis in named]
    axes = [axis for axis in range(rank) if axis not in _moved_axes(context, places)]
    found = follow([Link({0: a}, {0: a}) for a in axes], context, inputs, outputs, "resized axis")
    if context.node.op_type != "Resize" or not context.has_input(3):
        return found
    cut = found.inputs[0]
    if cut.axis not in places:
        return found
    edit = SetEntry(3, places.index(cut.axis), cut, len(places))
    return Assignment(inputs=found.inputs, outputs=found.outputs, edits=(edit,))


def _moved_axes(context: NodeContext, places: Sequence[int]) -> set[int]:
    """Of the axes that a Resize or Upsample names, those along which elements may move, even if their size stays."""
    before, after = context.shape(0), context.result()
    moves_all = (
        context.attribute("coordinate_transformation_mode", "half_pixel")
        in ("tf_crop_and_resize", "tf_half_pixel_for_nn")
        or context.attribute("keep_aspect_ratio_policy", "stretch") != "stretch"
    )
    if moves_all:
        return set(places)
    if context.node.op_type == "Resize" and context.has_input(3):
        return {axis for axis in places if before[axis] != after[axis]}
    place = 2 if context.node.op_type == "Resize" and context.version >= 11 else 1
    scales = context.numbers(place) if context.has_input(place) else context.attribute("scales")
    if scales is None:
        raise CannotShardError(f"{context.name}: how much it resizes depends on data")
    return {axis for axis, scale in zip(places, scales, strict=True) if scale != 1}


_SUMS = ("ReduceSum",)
_SUMS_OVER_RANKS = (*_SUMS, "ReduceMean", "ReduceSumSquare", "ReduceL1")


@rule(
    "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum",
    "ReduceLogSumExp", "ReduceSumSquare",
)  # fmt: skip
def reduction(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Any axis that is kept; along one that is reduced, sums are sums of parts, and means those of weighted parts."""
    shape = context.shape(0)
    given = context.attribute("axes")
    if given is None and context.has_input(1):
        given = context.numbers(1)
        if given is None:
            raise CannotShardError(f"{context.name}: its axes depend on data")
    everything = not given and not context.attribute("noop_with_empty_axes", 0)
    reduced = set(range(len(shape))) if everything else {int(a) % len(shape) for a in given or ()}
    keep = bool(context.attribute("keepdims", 1))
    kept = [axis for axis in range(len(shape)) if axis not in reduced]
    links = [Link({0: axis}, {0: axis if keep else place}) for place, axis in enumerate(kept)]
    if context.node.op_type in (_SUMS_OVER_RANKS if context.facts.norms_over_ranks else _SUMS):
        links += [Link({0: axis}, {}, partial=True) for axis in sorted(reduced)]
    found = follow(links, context, inputs, outputs, "reduced axis")
    if found.partial and context.node.op_type == "ReduceMean":
        return replace(found, edits=(WeighMean(found.inputs[0]),))
    return found


@rule("ArgMax")
def arg_max(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Any other axis; along its own by comparing the best of all ranks."""
    rank = len(context.shape(0))
    own = context.axis("axis", 0, rank)
    keep = bool(context.attribute("keepdims", 1))
    links = [Link({0: a}, {0: a if keep or a < own else a - 1}) for a in range(rank) if a != own]
    cut = inputs.get(0)
    if cut is not None and cut.axis == own and not outputs:
        return Assignment(inputs={0: cut}, gathers=True, edits=(Replace("ShardedArgMax", cut),))
    return follow(links, context, inputs, outputs)


@rule("SoftmaxCrossEntropyLoss")
def cross_entropy(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """The classes: every rank knows the logits of its own, and the ranks reduce each row's maximum and sums."""
    cut = inputs.get(0)
    if cut is None or cut.axis != 1 or set(inputs) != {0} or len(cut.blocks) > 1:
        raise CannotShardError(f"{context.name} can be sharded by classes only")
    if len(context.outputs()) > 1 or outputs:
        raise CannotShardError(f"{context.name} also gives the logarithms of all probabilities")
    return Assignment(inputs={0: cut}, gathers=True, edits=(Replace("ShardedCrossEntropy", cut),))


@rule("Shape")
def shape(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """The shape of the full value, which shape arithmetic continues with."""
    cut, rank = inputs[0], len(context.shape(0))
    start, end, _ = slice(context.attribute("start", 0), context.attribute("end")).indices(rank)
    edits = (SetEntry(-1, cut.axis - start, cut, end - start),) if start <= cut.axis < end else ()
    return Assignment(inputs={0: cut}, gathers=True, edits=edits)
