"""The updates of classes of torch.optim as ONNX nodes: for each class its slots, and its formula.

Options are those of a group of torch's. Slots have the names that they have in torch's state, and begin as zeros in
every graph: those that begin as something else in torch get it in the first update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onward.artifacts.update_arithmetic import UpdateArithmetic

Options = Mapping[str, Any]
_RECTIFIED_ABOVE = 5.0
"""Liu et al. 2020: the length of the approximated average from which RAdam has a variance to divide by."""

_SERIES_BELOW = 0.5
"""Where y coth(y) - 1 is a series: the difference loses digits."""


@dataclass(frozen=True, kw_only=True)
class ClassUpdate:
    """What the update of a weight reads.

    Attributes:
        writer: writes it.
        options: of the weight's group.
        rate: the learning rate, in the weight's type.
        factor: of the group's learning rate, which is in `rate` already.
        count: updates done, this one included, in the weight's type.
        before: those done before, likewise.
        weight, gradient: the gradient is clipped.
        slots: in the order of `slots_of_class`.
    """

    writer: UpdateArithmetic
    options: Options
    rate: ir.Value
    factor: float
    count: ir.Value
    before: ir.Value
    weight: ir.Value
    gradient: ir.Value
    slots: list[ir.Value]

    def op(self, op_type: str, *inputs: ir.Value | float) -> ir.Value:
        """An operator on values and numbers, in the weight's type."""
        return self.writer.op(op_type, *map(self._value, inputs))

    def where(self, condition: tuple[str, ir.Value, float], one: ir.Value | float, other: ir.Value | float) -> ir.Value:
        """A choice by a comparison: its operator and what it compares."""
        compared, left, right = condition
        held = self.writer.writer.apply(compared, left, self._value(right))
        return self.writer.typed(
            self.writer.writer.apply("Where", held, self._value(one), self._value(other)), self.weight.dtype
        )

    def begun(self, slot: ir.Value, start: ir.Value | float) -> ir.Value:
        """A slot, which begins as a number other than 0."""
        return self.op("Add", slot, self.where(("Less", self.before, 0.5), start, 0.0))

    def decayed_gradient(self) -> ir.Value:
        """With the weight decay that is part of the gradient."""
        return self.writer.add_scaled(self.gradient, self.weight, self.options["weight_decay"])

    def decayed(self) -> tuple[ir.Value, ir.Value]:
        """Weight and gradient, one of them with the weight decay."""
        if not self.options.get("decoupled_weight_decay"):
            return self.weight, self.decayed_gradient()
        return self.writer.decayed(self.weight, self.rate, self.options["weight_decay"]), self.gradient

    def moments(self, gradient: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The running means of a gradient and of its squares."""
        first, second = self.options["betas"]
        square = self.op("Mul", gradient, gradient)
        return self.writer.blend(self.slots[0], gradient, first), self.writer.blend(self.slots[1], square, second)

    def corrections(self) -> tuple[ir.Value, ir.Value]:
        """1 - beta ** count of both means, of the second its square root."""
        first, second = self.options["betas"]
        write = self.writer
        return write.correction(first, self.count, self.weight), write.root_of_correction(
            second, self.count, self.weight
        )

    def subtract(self, weight: ir.Value, length: ir.Value, direction: ir.Value) -> ir.Value:
        """A weight less a multiple of a direction."""
        return self.writer.subtract(weight, length, direction)

    def _value(self, value: ir.Value | float) -> ir.Value:
        return value if isinstance(value, ir.Value) else self.writer.number(value, self.weight)


def slots_of_class(name: str, options: Options, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The slots of a weight but for torch's count of updates, which graphs have once: name -> shape.

    Args:
        name: `torch.optim.RAdam`.
        options: of the weight's group.
        shape: of the weight.
    """
    moments = ["exp_avg", "exp_avg_sq"]
    scalars = {"torch.optim.NAdam": ["mu_product"], "torch.optim.ASGD": ["eta", "mu"]}.get(name, [])
    full = {
        "torch.optim.Adam": [*moments, *(["max_exp_avg_sq"] if options.get("amsgrad") else [])],
        "torch.optim.AdamW": [*moments, *(["max_exp_avg_sq"] if options.get("amsgrad") else [])],
        "torch.optim.NAdam": moments,
        "torch.optim.RAdam": moments,
        "torch.optim.Adamax": ["exp_avg", "exp_inf"],
        "torch.optim.Adadelta": ["square_avg", "acc_delta"],
        "torch.optim.Adagrad": ["sum"],
        "torch.optim.RMSprop": [
            "square_avg",
            *(["momentum_buffer"] if options.get("momentum") else []),
            *(["grad_avg"] if options.get("centered") else []),
        ],
        "torch.optim.Rprop": ["prev", "step_size"],
        "torch.optim.ASGD": ["ax"],
    }[name]
    return {**dict.fromkeys(full, shape), **dict.fromkeys(scalars, ())}


def _adam(u: ClassUpdate) -> list[ir.Value]:
    """Kingma & Ba 2015, Loshchilov & Hutter 2019, and Reddi et al. 2018 (`amsgrad`)."""
    weight, gradient = u.decayed()
    first, second = u.moments(gradient)
    kept = [u.op("Max", u.slots[2], second)] if u.options["amsgrad"] else []
    correction, root = u.corrections()
    spread = u.op("Add", u.op("Sqrt", [second, *kept][-1]), u.op("Mul", root, u.options["eps"]))
    length = u.op("Mul", u.rate, u.op("Div", root, correction))
    return [u.subtract(weight, length, u.op("Div", first, spread)), first, second, *kept]


def _nadam(u: ClassUpdate) -> list[ir.Value]:
    """Dozat 2016, its momentum growing from half of beta."""
    weight, gradient = u.decayed()
    first, second = u.moments(gradient)
    now, following = (_nadam_momentum(u, count) for count in (u.count, u.op("Add", u.count, 1.0)))
    product = u.op("Mul", u.begun(u.slots[2], 1.0), now)
    _, root = u.corrections()
    spread = u.op("Add", u.op("Div", u.op("Sqrt", second), root), u.options["eps"])
    rest = u.op("Sub", 1.0, product)
    length = u.op("Div", u.op("Mul", u.rate, u.op("Sub", 1.0, now)), rest)
    weight = u.subtract(weight, length, u.op("Div", gradient, spread))
    rest = u.op("Sub", 1.0, u.op("Mul", product, following))
    length = u.op("Div", u.op("Mul", u.rate, following), rest)
    return [u.subtract(weight, length, u.op("Div", first, spread)), first, second, product]


def _nadam_momentum(u: ClassUpdate, count: ir.Value) -> ir.Value:
    falling = u.op("Pow", 0.96, u.op("Mul", count, u.options["momentum_decay"]))
    return u.op("Mul", u.op("Sub", 1.0, u.op("Mul", falling, 0.5)), u.options["betas"][0])


def _radam(u: ClassUpdate) -> list[ir.Value]:
    """Liu et al. 2020."""
    weight, gradient = u.decayed()
    first, second = u.moments(gradient)
    correction, root = u.corrections()
    length, longest = u.op("Div", u.rate, correction), 2 / (1 - u.options["betas"][1]) - 1
    direction = first
    if longest > _RECTIFIED_ABOVE:  # else it never is
        terms = _average_length(u)
        held = u.op("Max", terms, _RECTIFIED_ABOVE)
        share = u.op("Div", u.op("Mul", u.op("Sub", held, 4.0), u.op("Sub", held, 2.0)), held)
        share = u.op("Sqrt", u.op("Mul", share, longest / ((longest - 4) * (longest - 2))))
        spread = u.op("Add", u.op("Sqrt", second), u.options["eps"])
        rectified = u.op("Mul", u.op("Div", first, spread), u.op("Mul", share, root))
        direction = u.where(("Greater", terms, _RECTIFIED_ABOVE), rectified, first)
    return [u.subtract(weight, length, direction), first, second]


def _average_length(u: ClassUpdate) -> ir.Value:
    """2 / (1 - b) - 1 - 2 t b^t / (1 - b^t), without a difference of large numbers, which float32 rounds.

    With r = -log(b) and y = r t / 2 it is 2 / (1 - b) - 1 - 2 / r + (2 / r) (1 + y - y coth(y)).
    """
    beta = u.options["betas"][1]
    rate = -math.log(beta)
    y = u.op("Mul", u.count, rate / 2)
    square = u.op("Mul", y, y)
    series: ir.Value = u.op("Mul", square, -1 / 4725)
    for factor in (2 / 945, -1 / 45, 1 / 3):
        series = u.op("Mul", u.op("Add", series, factor), square)
    excess = u.where(("Less", y, _SERIES_BELOW), series, u.op("Sub", u.op("Div", y, u.op("Tanh", y)), 1.0))
    start = 2 / (1 - beta) - 1 - 2 / rate
    return u.op("Add", u.op("Mul", u.op("Sub", y, excess), 2 / rate), start)


def _adamax(u: ClassUpdate) -> list[ir.Value]:
    """Kingma & Ba 2015, section 7.1."""
    gradient = u.decayed_gradient()
    first = u.writer.blend(u.slots[0], gradient, u.options["betas"][0])
    size = u.op("Add", u.op("Abs", gradient), u.options["eps"])
    largest = u.op("Max", u.op("Mul", u.slots[1], u.options["betas"][1]), size)
    length = u.op("Div", u.rate, u.writer.correction(u.options["betas"][0], u.count, u.weight))
    return [u.subtract(u.weight, length, u.op("Div", first, largest)), first, largest]


def _adadelta(u: ClassUpdate) -> list[ir.Value]:
    """Zeiler 2012."""
    gradient, rho, least = u.decayed_gradient(), u.options["rho"], u.options["eps"]
    squares = u.writer.blend(u.slots[0], u.op("Mul", gradient, gradient), rho)
    spreads = [u.op("Sqrt", u.op("Add", value, least)) for value in (u.slots[1], squares)]
    change = u.op("Mul", u.op("Div", *spreads), gradient)
    changes = u.writer.blend(u.slots[1], u.op("Mul", change, change), rho)
    return [u.subtract(u.weight, u.rate, change), squares, changes]


def _adagrad(u: ClassUpdate) -> list[ir.Value]:
    """Duchi et al. 2011."""
    gradient, start = u.decayed_gradient(), u.options["initial_accumulator_value"]
    held = u.begun(u.slots[0], start) if start else u.slots[0]
    total = u.op("Add", held, u.op("Mul", gradient, gradient))
    spread = u.op("Add", u.op("Sqrt", total), u.options["eps"])
    length = u.op("Div", u.rate, u.op("Add", u.op("Mul", u.before, u.options["lr_decay"]), 1.0))
    return [u.subtract(u.weight, length, u.op("Div", gradient, spread)), total]


def _rmsprop(u: ClassUpdate) -> list[ir.Value]:
    """Hinton 2012, lecture 6e; centered as in Graves 2013."""
    gradient, alpha = u.decayed_gradient(), u.options["alpha"]
    squares = u.writer.blend(u.slots[0], u.op("Mul", gradient, gradient), alpha)
    variance, means = squares, []
    if u.options["centered"]:
        means = [u.writer.blend(u.slots[-1], gradient, alpha)]
        # Rounded, it can be below 0, of which torch's square root is NaN.
        variance = u.op("Max", u.op("Sub", squares, u.op("Mul", means[0], means[0])), 0.0)
    direction = u.op("Div", gradient, u.op("Add", u.op("Sqrt", variance), u.options["eps"]))
    momenta = []
    if u.options["momentum"]:
        direction = u.writer.add_scaled(direction, u.slots[1], u.options["momentum"])
        momenta = [direction]
    return [u.subtract(u.weight, u.rate, direction), squares, *momenta, *means]


def _rprop(u: ClassUpdate) -> list[ir.Value]:
    """Riedmiller & Braun 1993, without taking steps back; the learning rate is that of the first step alone."""
    (falls, grows), (shortest, longest) = u.options["etas"], u.options["step_sizes"]
    agreement = u.op("Mul", u.gradient, u.slots[0])
    first_rate = u.op("Mul", u.writer.like(u.writer.first_rate, u.weight), u.factor)
    rising = u.where(("Greater", agreement, 0.0), grows, 1.0)
    share = u.where(("Less", agreement, 0.0), falls, rising)
    length = u.op("Mul", u.begun(u.slots[1], first_rate), share)
    length = u.op("Min", u.op("Max", length, shortest), longest)
    gradient = u.where(("Less", agreement, 0.0), 0.0, u.gradient)
    return [u.subtract(u.weight, length, u.op("Sign", gradient)), gradient, length]


def _asgd(u: ClassUpdate) -> list[ir.Value]:
    """Polyak & Juditsky 1992; `ax` is the average, which onward does not use."""
    gradient, decay = u.decayed_gradient(), u.options["lambd"]
    first_rate = u.op("Mul", u.writer.like(u.writer.first_rate, u.weight), u.factor)
    eta, share = u.begun(u.slots[1], first_rate), u.begun(u.slots[2], 1.0)
    weight = u.subtract(u.writer.decayed(u.weight, eta, decay), eta, gradient)
    average = u.op("Add", u.op("Mul", u.slots[0], u.op("Sub", 1.0, share)), u.op("Mul", weight, share))
    growth = u.op("Add", u.op("Mul", u.op("Mul", u.rate, u.count), decay), 1.0)
    eta = u.op("Div", u.rate, u.op("Pow", growth, u.options["alpha"]))
    share = u.op("Div", 1.0, u.op("Max", u.op("Sub", u.count, u.options["t0"]), 1.0))
    return [weight, average, eta, share]


_FORMULAS: Mapping[str, Callable[[ClassUpdate], list[ir.Value]]] = {
    "torch.optim.ASGD": _asgd,
    "torch.optim.Adadelta": _adadelta,
    "torch.optim.Adagrad": _adagrad,
    "torch.optim.Adam": _adam,
    "torch.optim.AdamW": _adam,
    "torch.optim.Adamax": _adamax,
    "torch.optim.NAdam": _nadam,
    "torch.optim.RAdam": _radam,
    "torch.optim.RMSprop": _rmsprop,
    "torch.optim.Rprop": _rprop,
}


def update_of_class(name: str, update: ClassUpdate) -> list[ir.Value]:
    """The new weight and slots, those in the order of `slots_of_class`."""
    return _FORMULAS[name](update)
