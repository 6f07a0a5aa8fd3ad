"""What one expert computes of a token: a hidden layer, with or without a gate, and a layer back to the token's size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onward.graph.fusion.expert_axes import Shares

INFINITY = float("inf")


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
        kind: `tokens`, `scaled` (tokens times their shares), `linear`, `bias`, `activation`, `product`, `half`,
            `clip` or `shift`.
        operands: of the step.
        weight: of `linear` and `bias`.
        name: of an activation.
        alpha: of Swish; what `shift` adds.
        half: which half of the features, 0 or 1.
        step: 2 where the halves alternate.
        bounds: of `clip`.
        shares: of `scaled`.
        value: that is this for every token of the model, and so may be what the experts read.
    """

    kind: str
    operands: tuple[Formula, ...] = ()
    weight: WeightOf | None = None
    name: str = ""
    alpha: float = 1.0
    half: int = 0
    step: int = 1
    bounds: tuple[float, float] = (-INFINITY, INFINITY)
    shares: Shares | None = None
    value: ir.Value | None = None

    def steps(self) -> Iterator[Formula]:
        """This step and all before it."""
        yield self
        for operand in self.operands:
            yield from operand.steps()


@dataclass(frozen=True)
class Layer:
    """A linear layer of an expert."""

    weight: WeightOf
    bias: WeightOf | None


@dataclass(frozen=True, kw_only=True)
class Body:
    """`down(activation(up(x)))`, or `down(activation(clip(gate(x))) * (clip(up(x)) + shift))`.

    Attributes:
        tokens: x.
        activation: its name.
        alpha: of Swish.
        gated: 0: there is no gate; 1: it is a layer of its own; 2: it is the first half of `up`; 3: every other
            feature of `up`, from the first.
        layers: the gate (where `gated` is 1), up, and down.
        bounds: of the gate, and of what it is multiplied with.
        shift: added to the latter.
        scales_input: shares are factors of x instead of the result.
    """

    tokens: ir.Value
    activation: str
    alpha: float
    gated: int
    layers: tuple[Layer, ...]
    bounds: tuple[float, ...] = (-INFINITY, INFINITY, -INFINITY, INFINITY)
    shift: float = 0.0
    scales_input: bool = False

    @property
    def form(self) -> tuple[object, ...]:
        """All but the layers; the experts of a mixture are alike in it."""
        return (
            self.tokens, self.activation, self.alpha, self.gated, self.bounds, self.shift, self.scales_input,
            self.layers[0].weight.rows_are_outputs, self.layers[0].bias is None,
        )  # fmt: skip

    def attributes(self) -> dict[str, int | float | str]:
        """Of the fused node; bounds and the like where they are not the usual."""
        found: dict[str, int | float | str] = {
            "activation": self.activation, "alpha": self.alpha, "gated": self.gated,
            "rows_are_outputs": int(self.layers[0].weight.rows_are_outputs),
            "is_biased": int(self.layers[0].bias is not None),
        }  # fmt: skip
        names = ("gate_low", "gate_high", "value_low", "value_high")
        found |= {n: bound for n, bound in zip(names, self.bounds, strict=True) if abs(bound) != INFINITY}
        found |= {"value_shift": self.shift} if self.shift else {}
        return found | ({"scales_input": 1} if self.scales_input else {})


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
    for gate, other in (hidden.operands, hidden.operands[::-1]):
        if gate.kind != "activation":
            continue
        source, of_gate, _ = _bounded(gate.operands[0], may_shift=False)
        value, of_value, shift = _bounded(other, may_shift=True)
        more = {"bounds": (*of_gate, *of_value), "shift": shift}
        if source.kind == value.kind == "half" and (source.half, value.half) == (0, 1):
            if source.operands != value.operands or source.step != value.step:
                return None
            return _body(gate, 1 + source.step, [_layer(source.operands[0]), (down, hidden)], **more)
        return _body(gate, 1, [_layer(source), _layer(value), (down, hidden)], **more)
    return None


def _bounded(formula: Formula, may_shift: bool) -> tuple[Formula, tuple[float, float], float]:
    """What was clipped and then shifted, the bounds, and by how much."""
    shift, bounds = 0.0, Formula(kind="").bounds
    if formula.kind == "shift" and may_shift:
        shift, formula = formula.alpha, formula.operands[0]
    if formula.kind == "clip":
        bounds, formula = formula.bounds, formula.operands[0]
    return formula, bounds, shift


def _layer(formula: Formula) -> tuple[Layer, Formula] | None:
    bias = None
    if formula.kind == "bias":
        bias, formula = formula.weight, formula.operands[0]
    if formula.kind != "linear" or formula.weight is None:
        return None
    return Layer(formula.weight, bias), formula.operands[0]


def _body(activation: Formula, gated: int, found: Sequence[tuple[Layer, Formula] | None], **more: Any) -> Body | None:
    layers = [one for one in found if one is not None]
    sources = {source for _, source in layers[:-1]}
    if len(layers) < len(found) or len(sources) != 1:
        return None
    (source,) = sources
    scales_input = source.kind == "scaled"
    source = source.operands[0] if scales_input else source
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
        scales_input=scales_input,
        **more,
    )


def stacked_weights(bodies: Sequence[Body], experts: int) -> list[list[ir.Value]] | None:
    """For each weight of the body, in order, its stack, or the weights of all experts; biases come last.

    Args:
        bodies: of all experts, or one for all of them.
        experts: how many there are.
    """
    first = bodies[0]
    if any(body.form != first.form for body in bodies):
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
