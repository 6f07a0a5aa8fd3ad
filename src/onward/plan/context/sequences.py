"""Where sequences begin: the queries of attention, followed back to where a rank's part is first made.

An attention tells which axis is the sequence: that of its queries. What is not attention (convolutions, recurrent
layers) is reached from there.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from onward.graph.fusion.rewriting import DOMAIN as FUSED
from onward.plan.context.ranges import TokenCut
from onward.plan.context.rules import Cuts, cut_node
from onward.plan.horizontal.cuts import CannotShardError
from onward.plan.horizontal.regions import PartitioningContext

_BETWEEN = frozenset({"Add", "Mul", "Div", "Sub", "Where", "Cast", "Max", "Clip", "Identity", "Tanh"})
"""Operators between the scores of an attention and their softmax."""


def find_sequences(partitioning: PartitioningContext, size: int) -> dict[ir.Value, TokenCut]:
    """The first values of every sequence that can be cut along it, each with its cut."""
    found: dict[ir.Value, TokenCut] = {}
    visited: set[ir.Value] = set()
    for value, axis in _queries(partitioning):
        shape = partitioning.facts.shapes.get(str(value.name), ())
        if 0 <= axis < len(shape) and shape[axis] >= 2 * size:
            _trace(partitioning, value, TokenCut(axis, (shape[axis],)), size, visited, found)
    return found


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
        elif node.op_type == "Softmax" and node.domain == "":
            product = _scores_of(first)
            queries = None if product is None else product.inputs[0]
            rank = 0 if queries is None else len(partitioning.facts.shapes.get(str(queries.name), ()))
            if queries is not None and rank >= 3 and all(_is_computed(partitioning, v) for v in product.inputs):  # type: ignore[union-attr]
                yield queries, rank - 2


def _is_computed(partitioning: PartitioningContext, value: ir.Value | None) -> bool:
    return value is not None and str(value.name) in partitioning.facts.from_inputs


def _scores_of(value: ir.Value) -> ir.Node | None:
    """The product of queries and keys that a softmax is taken of."""
    stack, seen = [value], set[ir.Value]()
    while stack:
        one = stack.pop()
        node = one.producer()
        if node is None or one in seen:
            continue
        seen.add(one)
        if node.op_type == "MatMul":
            return node
        if node.op_type in _BETWEEN and node.domain == "":
            stack.extend(v for v in node.inputs if v is not None)
    return None


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
