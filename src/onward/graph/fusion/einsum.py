"""The two products of attention as `Einsum`: which letter is what, and which order of axes that means."""

from __future__ import annotations

import onnx_ir as ir

Ordered = tuple[ir.Value, tuple[int, ...] | None]
"""A value, and the order of its axes that is wanted; None: the one it has."""


def read_score_product(node: ir.Node) -> tuple[Ordered, Ordered] | None:
    """Queries and keys of `...qd,...kd->...qk`, each to be ordered [batch.., tokens, size]."""
    parts = _letters(node)
    if parts is None:
        return None
    left, right, result = parts
    *batch, query, key = result
    first, second = node.inputs
    if query not in left:
        left, right, first, second = right, left, second, first
    shared = (set(left) & set(right)) - set(result)
    if len(shared) != 1 or first is None or second is None or first is second:
        return None
    size = shared.pop()
    if {*left} != {*batch, query, size} or {*right} != {*batch, key, size}:
        return None
    return (first, _order(left, [*batch, query, size])), (second, _order(right, [*batch, key, size]))


def read_probability_product(node: ir.Node) -> tuple[Ordered, tuple[int, ...] | None] | None:
    """The values of `...qk,...kd->...qd`, and the order that brings [batch.., L, E] into the form of the result."""
    parts = _letters(node)
    if parts is None:
        return None
    probabilities, values, result = parts
    *batch, query, key = probabilities
    size = set(values) - {*batch, key}
    if len(size) != 1 or query in values or node.inputs[1] is None:
        return None
    feature = size.pop()
    if {*values} != {*batch, key, feature} or {*result} != {*batch, query, feature}:
        return None
    order = _order([*batch, query, feature], result)
    return (node.inputs[1], _order(values, [*batch, key, feature])), order


def _letters(node: ir.Node) -> tuple[list[str], list[str], list[str]] | None:
    """The letters of both operands and the result, each letter once in each; None for anything else."""
    equation = node.attributes["equation"].as_string().replace(" ", "")
    terms, arrow, result = equation.partition("->")
    operands = terms.split(",")
    if not arrow or "." in equation or len(operands) != 2 or len(node.inputs) != 2:
        return None
    parts = [list(operands[0]), list(operands[1]), list(result)]
    if any(len(set(part)) != len(part) or len(part) not in (3, 4) for part in parts):
        return None
    return parts[0], parts[1], parts[2]


def _order(have: list[str], want: list[str]) -> tuple[int, ...] | None:
    return None if have == want else tuple(have.index(letter) for letter in want)
