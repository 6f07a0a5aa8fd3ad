"""What one expert computes of a token: a hidden layer, with or without a gate, and a layer back to the token's size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True)
class WeightOf:
    """A weight as an expert reads it.

    Attributes:
        value: the initializer.
        expert: whose slice of a stack is read; None: the weight of all, or of one expert alone.
        is_stack: whether its first axis are the experts.
        rows_are_outputs: whether a matrix is [outputs, inputs].
    """

    value: ir.Value
    expert: int | None = None
    is_stack: bool = False
    rows_are_outputs: bool = False


@dataclass(frozen=True, kw_only=True)
class Formula:
    """A step of what an expert computes.

    Attributes:
        kind: `tokens`, `linear`, `bias`, `activation`, `product` or `half`.
        operands: of the step.
        weight: of `linear` and `bias`.
        name: of an activation.
        alpha: of Swish.
        half: which half of the features, 0 or 1.
        value: that is this for every token of the model, and so may be what the experts read.
    """

    kind: str
    operands: tuple[Formula, ...] = ()
    weight: WeightOf | None = None
    name: str = ""
    alpha: float = 1.0
    half: int = 0
    value: ir.Value | None = None


@dataclass(frozen=True)
class Layer:
    """A linear layer of an expert."""

    weight: WeightOf
    bias: WeightOf | None


@dataclass(frozen=True, kw_only=True)
class Body:
    """`down(activation(up(x)))`, or `down(activation(gate(x)) * up(x))`.

    Attributes:
        tokens: x.
        activation: its name.
        alpha: of Swish.
        gated: 0: there is no gate; 1: it is a layer of its own; 2: it is the first half of `up`.
        layers: the gate (where `gated` is 1), up, and down.
    """

    tokens: ir.Value
    activation: str
    alpha: float
    gated: int
    layers: tuple[Layer, ...]


def read_body(formula: Formula) -> Body | None:
    """The body that a formula is."""
    outer = _layer(formula)
    if outer is None:
        return None
    down, hidden = outer
    if hidden.kind == "activation":
        inner = _layer(hidden.operands[0])
        return _body(hidden, 0, [inner, (down, hidden)])
    if hidden.kind != "product":
        return None
    for gate, value in (hidden.operands, hidden.operands[::-1]):
        if gate.kind != "activation":
            continue
        source = gate.operands[0]
        if source.kind == value.kind == "half" and (source.half, value.half) == (0, 1):
            if source.operands != value.operands:
                return None
            return _body(gate, 2, [_layer(source.operands[0]), (down, hidden)])
        return _body(gate, 1, [_layer(source), _layer(value), (down, hidden)])
    return None


def _layer(formula: Formula) -> tuple[Layer, Formula] | None:
    bias = None
    if formula.kind == "bias":
        bias, formula = formula.weight, formula.operands[0]
    if formula.kind != "linear" or formula.weight is None:
        return None
    return Layer(formula.weight, bias), formula.operands[0]


def _body(activation: Formula, gated: int, found: Sequence[tuple[Layer, Formula] | None]) -> Body | None:
    layers = [one for one in found if one is not None]
    sources = {source for _, source in layers[:-1]}
    if len(layers) < len(found) or len(sources) != 1:
        return None
    (source,) = sources
    forms = {layer.weight.rows_are_outputs for layer, _ in layers}
    biased = {layer.bias is not None for layer, _ in layers}
    if source.value is None or len(forms) > 1 or len(biased) > 1:
        return None
    return Body(
        tokens=source.value,
        activation=activation.name,
        alpha=activation.alpha,
        gated=gated,
        layers=tuple(layer for layer, _ in layers),
    )


def stacked_weights(bodies: Sequence[Body], experts: int) -> list[list[ir.Value]] | None:
    """For each weight of the body, in order, its stack, or the weights of all experts; biases come last.

    Args:
        bodies: of all experts, or one for all of them.
        experts: how many there are.
    """
    first = bodies[0]
    alike = (first.tokens, first.activation, first.alpha, first.gated)
    if any((body.tokens, body.activation, body.alpha, body.gated) != alike for body in bodies):
        return None
    if len({body.layers[0].weight.rows_are_outputs for body in bodies}) > 1:
        return None
    columns: list[list[WeightOf]] = [[body.layers[i].weight for body in bodies] for i in range(len(first.layers))]
    if any((layer.bias is None) != (first.layers[0].bias is None) for body in bodies for layer in body.layers):
        return None
    if first.layers[0].bias is not None:
        columns += [[b for body in bodies if (b := body.layers[i].bias) is not None] for i in range(len(first.layers))]
    found = [_one_stack(column, experts) for column in columns]
    kept = [one for one in found if one is not None]
    if len(kept) < len(found) or len({len(one) for one in kept}) > 1:
        return None
    return kept


def _one_stack(column: Sequence[WeightOf], experts: int) -> list[ir.Value] | None:
    values = [weight.value for weight in column]
    if column[0].is_stack:
        is_in_order = len(column) == 1 or [weight.expert for weight in column] == list(range(experts))
        return values[:1] if is_in_order and len(set(values)) == 1 else None
    return values if len(set(values)) == experts and len(column) == experts else None
