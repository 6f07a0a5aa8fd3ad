"""Rules of matmuls with weights: matrix products, convolutions, embeddings, attention."""

from __future__ import annotations

import math

from onward.plan.horizontal.cuts import (
    Assignment,
    CannotShardError,
    Edit,
    Known,
    Link,
    NodeContext,
    Replace,
    SetAttribute,
    follow,
    units,
)
from onward.plan.horizontal.rules import rule
from onward.plan.shards import Sharding


@rule("MatMul")
def matmul(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Rows, columns and batches are kept; the axis in common is summed over."""
    a, b, result = context.shape(0), context.shape(1), context.result()
    rank = len(result)
    links = [Link({0: len(a) - 1, 1: max(len(b) - 2, 0)}, {}, partial=True)]
    if len(b) >= 2:
        links.append(Link({1: len(b) - 1}, {0: rank - 1}))
    if len(a) >= 2:
        links.append(Link({0: len(a) - 2}, {0: rank - 1 - (len(b) >= 2)}))
    batch = rank - (len(a) >= 2) - (len(b) >= 2)
    for axis in range(batch):
        own = {0: axis - (batch - (len(a) - 2)), 1: axis - (batch - (len(b) - 2))}
        shapes = (a, b)
        found = {i: place for i, place in own.items() if place >= 0 and shapes[i][place] == result[axis]}
        if result[axis] > 1:
            links.append(Link(found, {0: axis}))
    return follow(links, context, inputs, outputs)


@rule("Gemm")
def gemm(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """As `MatMul`, with a bias that is added once."""
    a_row, b_row = (
        (1, 0) if context.attribute("transA", 0) else (0, 1),
        (1, 0) if context.attribute("transB", 0) else (0, 1),
    )
    columns, rows = {1: b_row[1]}, {0: a_row[0]}
    if context.has_input(2):
        bias, result = context.shape(2), context.result()
        if bias and bias[-1] == result[1]:
            columns[2] = len(bias) - 1
        if len(bias) == 2 and bias[0] == result[0]:
            rows[2] = 0
    links = [
        Link(columns, {0: 1}),
        Link(rows, {0: 0}),
        Link({0: a_row[1], 1: b_row[0]}, {}, partial=True, bias=(2, 1)),
    ]
    return follow(links, context, inputs, outputs)


@rule("Einsum")
def einsum(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """A letter of the result is kept; one that only operands have is summed over."""
    equation = str(context.attribute("equation")).replace(" ", "")
    if "..." in equation or "->" not in equation:
        raise CannotShardError(f"{context.name}: the equation {equation!r} leaves axes out")
    left, right = equation.split("->")
    terms = left.split(",")
    links = []
    for letter in dict.fromkeys("".join(terms)):
        places = {i: term.index(letter) for i, term in enumerate(terms) if letter in term}
        if any(term.count(letter) > 1 for term in terms):
            continue
        if letter in right:
            links.append(Link(places, {0: right.index(letter)}))
        elif len(places) > 1:
            links.append(Link(places, {}, partial=True))
    return follow(links, context, inputs, outputs)


@rule("Conv")
def convolution(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Output channels are kept, input channels summed over; groups of both go together."""
    groups = int(context.attribute("group", 1))
    if groups > 1:
        return _grouped(context, inputs, outputs, groups, context.result()[1])
    links = [
        Link({1: 0, 2: 0} if context.has_input(2) else {1: 0}, {0: 1}),
        Link({0: 1, 1: 1}, {}, partial=True, bias=(2, 1)),
        Link({0: 0}, {0: 0}),
    ]
    return follow(links, context, inputs, outputs, "space")


@rule("ConvTranspose")
def transposed_convolution(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """As `Conv`; its weight has the input channels first."""
    groups = int(context.attribute("group", 1))
    if groups > 1:
        return _grouped(context, inputs, outputs, groups, context.shape(0)[1])
    links = [
        Link({1: 1, 2: 0} if context.has_input(2) else {1: 1}, {0: 1}),
        Link({0: 1, 1: 0}, {}, partial=True, bias=(2, 1)),
        Link({0: 0}, {0: 0}),
    ]
    return follow(links, context, inputs, outputs, "space")


def _grouped(context: NodeContext, inputs: Known, outputs: Known, groups: int, weight_rows: int) -> Assignment:
    """Whole groups: their input channels, their weights, their output channels."""
    totals = {"x": context.shape(0)[1], "w": weight_rows, "b": context.result()[1], "y": context.result()[1]}
    operands = {"x": (0, 1), "w": (1, 0), "b": (2, 0)}
    known = [(inputs[i], totals[key], axis) for key, (i, axis) in operands.items() if i in inputs]
    known += [(outputs[0], totals["y"], 1)] if 0 in outputs else []
    of_groups = set()
    for cut, total, axis in known:
        if cut.axis != axis:
            raise CannotShardError(f"{context.name} is sharded along other axes than its groups")
        if units(cut.blocks, total // groups) is None:
            raise CannotShardError(f"{context.name}: a group of channels would be split")
        of_groups.add(tuple(block * groups // total for block in cut.blocks))
    if len(of_groups) > 1:
        raise CannotShardError(f"{context.name}: its operands are sharded into different groups")
    (blocks,) = of_groups
    cuts = {key: tuple(block * total // groups for block in blocks) for key, total in totals.items()}
    given = {i: Sharding(axis, cuts[key]) for key, (i, axis) in operands.items() if context.has_input(i)}
    return Assignment(
        inputs=given,
        outputs={0: Sharding(1, cuts["y"])},
        counts=((math.gcd(*blocks), f"groups of {context.name}"),),
        edits=(SetAttribute("group", Sharding(0, blocks)),),
    )


@rule("Gather")
def gather(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Axes that are not looked up in, axes of the indices, and the rows of a table of weights (an embedding)."""
    data, indices = context.shape(0), context.shape(1)
    own = context.axis("axis", 0, len(data))
    table = context.node.inputs[0]
    cut = inputs.get(0)
    if cut is not None and cut.axis == own:
        assert table is not None
        if str(table.name) in context.facts.from_inputs or own != 0 or len(data) < 2 or len(cut.blocks) > 1:
            raise CannotShardError(f"{context.name} picks elements of the sharded axis")
        return Assignment(inputs={0: cut}, partial=True, edits=(Replace("ShardedGather", cut),))
    links = [
        Link({0: axis}, {0: axis if axis < own else axis - 1 + len(indices)})
        for axis in range(len(data))
        if axis != own
    ]
    links += [Link({1: axis}, {0: own + axis}) for axis in range(len(indices))]
    return follow(links, context, inputs, outputs)


@rule("GatherND")
def gather_nd(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Axes behind those that the indices name."""
    data, indices = context.shape(0), context.shape(1)
    batch = int(context.attribute("batch_dims", 0))
    first = batch + indices[-1]
    links = [Link({0: axis}, {0: len(indices) - 1 + axis - first}) for axis in range(first, len(data))]
    links += [Link({0: axis, 1: axis}, {0: axis}) for axis in range(batch)]
    return follow(links, context, inputs, outputs, "indexed axis")


@rule("GatherElements")
def gather_elements(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Any axis but the one that is looked up in."""
    data, indices = context.shape(0), context.shape(1)
    own = context.axis("axis", 0, len(data))
    axes = [a for a in range(len(data)) if a != own and data[a] == indices[a]]
    return follow([Link({0: a, 1: a}, {0: a}) for a in axes], context, inputs, outputs, "indexed axis")


@rule("Attention")
def attention(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Whole heads of queries, with the heads of keys and values that they look at."""
    edits: tuple[Edit, ...] = ()
    if len(context.shape(0)) == 4:
        axis, heads, key_heads = 1, context.shape(0)[1], context.shape(1)[1]
    else:
        axis, heads, key_heads = 2, int(context.attribute("q_num_heads")), int(context.attribute("kv_num_heads"))
        edits = (SetAttribute("q_num_heads", Sharding(0, (heads,))),)
        edits += () if key_heads == 1 else (SetAttribute("kv_num_heads", context.facts.heads(0, key_heads, key_heads)),)
    found: dict[int, Sharding] = {0: Sharding(axis, (context.shape(0)[axis],))}
    if key_heads > 1:
        found |= {i: context.facts.heads(axis, context.shape(i)[axis], key_heads) for i in (1, 2)}
    if context.has_input(3):
        mask = context.shape(3)
        place = len(mask) - 3
        if place >= 0 and mask[place] == heads and heads > 1:
            found[3] = Sharding(place, (heads,))
    results = {}
    for index in context.outputs():
        full = context.result(index)
        if index in (1, 2) and key_heads > 1:
            results[index] = context.facts.heads(1, key_heads, key_heads)
        elif index == 0 or index == 3:
            results[index] = Sharding(axis if index == 0 else 1, (full[axis] if index == 0 else heads,))
    past = {
        i: context.facts.heads(1, key_heads, key_heads)
        for i in (4, 5)
        if context.has_input(i) and key_heads > 1 and len(context.shape(i)) == 4
    }
    count = heads if key_heads == 1 or context.facts.parts(key_heads) else math.gcd(heads, key_heads)
    return Assignment(
        inputs={**found, **past}, outputs=results, counts=((count, f"heads of {context.name}"),), edits=edits
    )


@rule("RotaryEmbedding", domains=("", "com.microsoft"))
def rotary_embedding(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Whole heads."""
    shape = context.shape(0)
    edits: tuple[Edit, ...] = ()
    if len(shape) == 4:
        heads, cut = shape[1], context.facts.heads(1, shape[1], shape[1])
    else:
        heads = int(context.attribute("num_heads", 0))
        if heads < 1:
            raise CannotShardError(f"{context.name} does not say how many heads there are")
        cut = context.facts.heads(2, shape[2], heads)
        edits = (SetAttribute("num_heads", context.facts.heads(0, heads, heads)),)
    counts = () if cut.parts else ((heads, f"heads of {context.name}"),)
    return Assignment(inputs={0: cut}, outputs={0: cut}, counts=counts, edits=edits)


@rule("MultiHeadAttention", "GroupQueryAttention", domains=("com.microsoft",))
def contrib_attention(context: NodeContext, inputs: Known, outputs: Known) -> Assignment:
    """Whole heads of separate queries, keys and values [B, S, heads * width]; without a past."""
    grouped = context.node.op_type == "GroupQueryAttention"
    heads = int(context.attribute("num_heads"))
    key_heads = int(context.attribute("kv_num_heads", heads)) if grouped else heads
    plain = all(context.has_input(i) and len(context.shape(i)) == 3 for i in (0, 1, 2))
    extra = [
        i for i in range(3, len(context.node.inputs)) if context.has_input(i) and i not in ((5, 6) if grouped else ())
    ]
    if not plain or extra or len(context.outputs()) > 1:
        raise CannotShardError(f"{context.name} has packed operands, masks or a past")
    found = {i: context.facts.heads(2, context.shape(i)[2], heads if i == 0 else key_heads) for i in (0, 1, 2)}
    edits = [SetAttribute("num_heads", Sharding(0, (heads,)))]
    if grouped:
        edits.append(SetAttribute("kv_num_heads", context.facts.heads(0, key_heads, key_heads)))
    count = heads if context.facts.parts(key_heads) else math.gcd(heads, key_heads)
    counts = ((count, f"heads of {context.name}"),)
    return Assignment(inputs=found, outputs={0: Sharding(2, (context.result()[2],))}, counts=counts, edits=tuple(edits))
