"""Where sequences begin: the queries of attention, followed back to where a rank's part is first made.

An attention tells which axis is the sequence: that of its queries. What is not attention (convolutions, recurrent
layers) is reached from there. In a model without attention, the first spatial axis of a convolution is the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from onward.graph.fusion.rewriting import DOMAIN as FUSED
from onward.graph.nodes.provenance import shown_node
from onward.plan.context.ranges import TokenCut
from onward.plan.context.rules import Cuts, cut_node
from onward.plan.horizontal.cuts import CannotShardError, NodeContext
from onward.plan.horizontal.regions import PartitioningContext
from onward.plan.horizontal.rules import apply_rule
from onward.plan.shards import Sharding

_BETWEEN = frozenset({"Add", "Mul", "Div", "Sub", "Where", "Cast", "Max", "Clip", "Identity", "Tanh"})
"""Operators between the scores of an attention and their softmax."""
_MOVING = frozenset({"Transpose", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators there that give the axes of the scores another place."""


def find_sequences(partitioning: PartitioningContext, size: int) -> dict[ir.Value, TokenCut]:
    """The first values of every sequence that can be cut along it, each with its cut."""
    found: dict[ir.Value, TokenCut] = {}
    visited: set[ir.Value] = set()
    attended = list(_queries(partitioning))
    for value, axis in attended or _convolved(partitioning, size):
        shape = partitioning.facts.shapes.get(str(value.name), ())
        if 0 <= axis < len(shape) and shape[axis] >= 2 * size:
            _trace(partitioning, value, TokenCut(axis, (shape[axis],)), size, visited, found)
    return found


def attended_lengths(partitioning: PartitioningContext) -> list[tuple[str, int]]:
    """Of every attention, the module or node that computes its queries, and their number."""
    found = []
    for value, axis in _queries(partitioning):
        shape, node = partitioning.facts.shapes.get(str(value.name), ()), value.producer()
        if 0 <= axis < len(shape) and node is not None:
            found.append((repr(shown_node(node)), shape[axis]))
    return found


def _convolved(partitioning: PartitioningContext, size: int) -> Iterator[tuple[ir.Value, int]]:
    """What convolutions give that read neighbours, and keep the number of elements, along their first spatial axis."""
    for node in partitioning.nodes:
        if node.op_type != "Conv" or node.domain or not _is_computed(partitioning, node.inputs[0]):
            continue
        length = partitioning.facts.shapes.get(str(node.outputs[0].name), (0, 0, 0))[2]
        try:
            made = cut_node(partitioning.context(node), {}, {0: TokenCut(2, (length,))}, size)
        except CannotShardError:
            continue
        if made.halo is not None:
            yield node.outputs[0], 2


def _queries(partitioning: PartitioningContext) -> Iterator[tuple[ir.Value, int]]:
    """The queries of every attention, with the axis of their tokens."""
    for node in partitioning.nodes:
        first = node.inputs[0] if node.inputs else None
        if first is None:
            continue
        if node.op_type in ("Attention", "MultiHeadAttention", "GroupQueryAttention"):
            rank = len(partitioning.facts.shapes.get(str(first.name), ()))
            if node.domain == FUSED or rank in (3, 4):
                yield first, rank - 2
    for product, (index, axis) in find_products(partitioning).items():
        value = product.inputs[index]
        assert value is not None
        yield value, axis


def find_products(partitioning: PartitioningContext) -> dict[ir.Node, tuple[int, int]]:
    """Products that a softmax over keys is taken of -> which operand the queries are, and the axis of their tokens."""
    found: dict[ir.Node, tuple[int, int]] = {}
    for node in partitioning.nodes:
        if node.op_type != "Softmax" or node.domain or node.inputs[0] is None:
            continue
        context = partitioning.context(node)
        try:
            rank = len(context.shape(0))
            axis = context.axis("axis", -1 if context.version >= 13 else 1, rank)
            product, keys = _product_of(partitioning, node.inputs[0], axis)
            queries = _operand_without(partitioning.context(product), keys)
        except (CannotShardError, LookupError):
            continue
        is_last = context.version >= 13 or axis == rank - 1
        if is_last and queries is not None and all(_is_computed(partitioning, v) for v in product.inputs):
            found[product] = queries
    return found


def _is_computed(partitioning: PartitioningContext, value: ir.Value | None) -> bool:
    return value is not None and str(value.name) in partitioning.facts.from_inputs


def _product_of(partitioning: PartitioningContext, value: ir.Value, axis: int) -> tuple[ir.Node, int]:
    """The product of queries and keys that scores were computed by, and the axis of its result that has the keys.

    Raises:
        LookupError: there is none.
    """
    stack, seen = [(value, axis)], set[ir.Value]()
    while stack:
        one, axis = stack.pop()
        node = one.producer()
        if node is None or one in seen or node not in partitioning.order or node.domain:
            continue
        seen.add(one)
        if node.op_type in ("MatMul", "Einsum"):
            return node, axis
        context = partitioning.context(node)
        if node.op_type in _BETWEEN:
            rank = len(context.result())
            for index, operand in enumerate(node.inputs):
                own = axis - rank + len(context.shape(index)) if operand is not None else -1
                if operand is not None and own >= 0 and context.shape(index)[own] == context.result()[axis]:
                    stack.append((operand, own))
        elif node.op_type == "Concat":  # of the scores and what takes part in the softmax, but has no value: a sink
            stack.extend((operand, axis) for operand in node.inputs if operand is not None)
        elif node.op_type in _MOVING:
            made = apply_rule(context, {}, {0: Sharding(axis, (context.result()[axis],))}).inputs[0]
            if len(made.blocks) == 1 and node.inputs[0] is not None:
                stack.append((node.inputs[0], made.axis))
    raise LookupError


def _operand_without(context: NodeContext, keys: int) -> tuple[int, int] | None:
    """Of a product, the operand that does not have the axis of the keys, and its own axis that the result has."""
    rank = len(context.result())
    if context.node.op_type == "MatMul":
        a, b = len(context.shape(0)), len(context.shape(1))
        if min(a, b) < 3 or keys < rank - 2:
            return None
        return (0, a - 2) if keys == rank - 1 else (1, b - 1)
    left, _, right = str(context.attribute("equation")).replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != 2 or not right or "." in left:
        return None
    index = 0 if right[keys] in terms[1] else 1
    tokens = [letter for letter in terms[index] if letter in right and letter not in terms[1 - index]]
    return (index, terms[index].index(tokens[0])) if right[keys] not in terms[index] and len(tokens) == 1 else None


def _trace(
    partitioning: PartitioningContext,
    value: ir.Value,
    cut: TokenCut,
    size: int,
    visited: set[ir.Value],
    found: dict[ir.Value, TokenCut],
) -> None:
    """Follows a cut back as far as every operand can be cut like it."""
    stack = [(value, cut)]
    while stack:
        value, cut = stack.pop()
        node = value.producer()
        if value in visited or node is None:
            continue
        visited.add(value)
        operands: Cuts = {}
        try:
            if node in partitioning.order:
                made = cut_node(partitioning.context(node), {}, {list(node.outputs).index(value): cut}, size).assignment
                operands = made.inputs if not made.partial else {}  # type: ignore[assignment]
        except (CannotShardError, StopIteration, KeyError):
            operands = {}
        further = [
            (operand, wanted)
            for index, wanted in operands.items()
            if (operand := node.inputs[index]) is not None
            and _is_computed(partitioning, operand)
            and operand in partitioning.from_weights
        ]
        if further:
            stack.extend(further)
        elif _is_computed(partitioning, value):
            found[value] = cut
