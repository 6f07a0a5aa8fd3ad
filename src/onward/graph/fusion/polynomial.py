"""Arithmetic on one or two values seen as a polynomial, so that it does not matter how an exporter bracketed it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onward.graph.fusion.rewriting import producer
from onward.graph.nodes.known_values import KnownValues

Powers = tuple[int, ...]
Polynomial = Mapping[Powers, float]
"""Exponents of the variables -> coefficient."""

_MOST_DEPTH = 8
_HIGHEST_POWER = 4


def polynomial(
    facts: KnownValues, value: ir.Value, variables: Sequence[ir.Value], depth: int = _MOST_DEPTH
) -> Polynomial | None:
    """A value as a polynomial in these variables; None if it is none of low degree."""
    if value in variables:
        return {tuple(int(value is variable) for variable in variables): 1.0}
    number = facts.number(value)
    if number is not None:
        return {(0,) * len(variables): number}
    node = producer(value, "Add", "Sub", "Mul", "Div", "Pow", "Neg", "Identity")
    if node is None or not depth:
        return None
    parts = [None if part is None else polynomial(facts, part, variables, depth - 1) for part in node.inputs]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    if node.op_type in ("Neg", "Identity"):
        return _times(known[0], {(0,) * len(variables): -1.0 if node.op_type == "Neg" else 1.0})
    left, right = known
    if node.op_type == "Add":
        return _plus(left, right, 1.0)
    if node.op_type == "Sub":
        return _plus(left, right, -1.0)
    if node.op_type == "Mul":
        return _times(left, right)
    constant = _constant(right)
    if constant is None or (node.op_type == "Div" and not constant):
        return None
    if node.op_type == "Div":
        return {powers: coefficient / constant for powers, coefficient in left.items()}
    if constant not in (1.0, 2.0, 3.0):
        return None
    result: Polynomial | None = left
    for _ in range(int(constant) - 1):
        result = None if result is None else _times(result, left)
    return result


def reached(
    facts: KnownValues, value: ir.Value, variables: Sequence[ir.Value], depth: int = _MOST_DEPTH
) -> list[ir.Node]:
    """The nodes that a polynomial is made of."""
    node = producer(value, "Add", "Sub", "Mul", "Div", "Pow", "Neg", "Identity")
    if value in variables or node is None or not depth or facts.number(value) is not None:
        return []
    inner = [
        part for source in node.inputs if source is not None for part in reached(facts, source, variables, depth - 1)
    ]
    return list(dict.fromkeys([*inner, node]))


def _constant(one: Polynomial) -> float | None:
    return next(iter(one.values())) if len(one) == 1 and not any(next(iter(one))) else None


def _plus(left: Polynomial, right: Polynomial, sign: float) -> Polynomial:
    total = dict(left)
    for powers, coefficient in right.items():
        total[powers] = total.get(powers, 0.0) + sign * coefficient
    return total


def _times(left: Polynomial, right: Polynomial) -> Polynomial | None:
    total: dict[Powers, float] = {}
    for first, a in left.items():
        for second, b in right.items():
            powers = tuple(i + j for i, j in zip(first, second, strict=True))
            if max(powers) > _HIGHEST_POWER:
                return None
            total[powers] = total.get(powers, 0.0) + a * b
    return total


def is_close(found: Polynomial | None, expected: Polynomial, tolerance: float) -> bool:
    """Whether two polynomials have the same terms, each coefficient to a relative tolerance."""
    if found is None:
        return False
    terms = {powers: coefficient for powers, coefficient in found.items() if coefficient}
    return terms.keys() == expected.keys() and all(
        abs(terms[powers] - wanted) <= tolerance * abs(wanted) for powers, wanted in expected.items()
    )
