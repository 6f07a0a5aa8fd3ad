"""The section `optimizer` of RUN.yaml: how gradients become weight updates, and rules for single weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import pydantic

from onward.optimizers.registry import OPTIMIZERS, optimizer_named
from onward.parameters.distributed import Distributed
from onward.parameters.field_types import (
    STRICT,
    Flag,
    FromOne,
    NonNegative,
    NonPositive,
    Number,
    OneOf,
    Positive,
    PositiveShare,
    ShareBelowOne,
)

OptimizerName = Annotated[str, OneOf(lambda: [(kind.name, "") for kind in OPTIMIZERS])]


@dataclass(frozen=True, kw_only=True)
class AttributeRule:
    """Optimizer attributes of the weights that match; a later rule wins over an earlier one, attribute by attribute.

    Attributes:
        weights: a name or `*`-pattern of initializers or module paths, or several.
        alpha, beta: decay of the first and second moment (0.9, 0.999; Lion 0.9, 0.99).
        lambda_: weight decay (YAML: `lambda`; 0). Adam and SGD add it to the gradient; all others decouple it.
        epsilon: 1e-8; Lamb 1e-6; Adafactor that of the weight's type.
        momentum, nesterov: of SGD (0, false) and of Muon's matrices (0.95, true).
        do_bias_correction: of Adam, AdamW and what Muon leaves to AdamW (true), and Lamb (false).
        ratio_min, ratio_max: bounds of Lamb's trust ratio (none).
        use_muon: whether Muon updates a matrix or leaves it to AdamW (true for matrices of hidden layers).
        beta2_decay: exponent by which Adafactor's second moment averages over more updates (-0.8).
        clip_threshold: largest root mean square of Adafactor's update (1).
        min_scale: smallest root mean square of a weight by which Adafactor scales its update (0.001).
        options: of a class of torch.optim: arguments of its constructor, by name; later rules add to earlier ones.
        learning_rate_factor: multiplies the learning rate for these weights (1).
    """

    __pydantic_config__ = STRICT
    weights: str | tuple[str, ...] = "*"
    alpha: ShareBelowOne | None = None
    beta: ShareBelowOne | None = None
    lambda_: Annotated[NonNegative | None, pydantic.Field(alias="lambda")] = None
    epsilon: NonNegative | None = None
    momentum: ShareBelowOne | None = None
    nesterov: Flag | None = None
    do_bias_correction: Flag | None = None
    ratio_min: Number | None = None
    ratio_max: Number | None = None
    use_muon: Flag | None = None
    beta2_decay: NonPositive | None = None
    clip_threshold: FromOne | None = None
    min_scale: NonNegative | None = None
    options: Mapping[str, Any] | None = None
    learning_rate_factor: NonNegative | None = None


Switch = Annotated[Flag, pydantic.BeforeValidator(lambda value: bool(value) if value in (0, 1) else value)]
"""A flag that may be written as 1 or 0."""


@dataclass(frozen=True, kw_only=True)
class SwitchRule:
    """Attributes of the weights that match which are true or false, written as 1 and 0.

    Attributes:
        weights: a name or `*`-pattern of initializers or module paths, or several.
        do_bias_correction, nesterov: as in a rule of `optimizer_attributes`.
    """

    __pydantic_config__ = STRICT
    weights: str | tuple[str, ...] = "*"
    do_bias_correction: Switch | None = None
    nesterov: Switch | None = None


AttributesOfWeight = Callable[[str], Mapping[str, Any]]
"""In Python, `optimizer_attributes` may be a function of the weight's name that returns its attributes."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """How gradients become updates.

    Attributes:
        training_optimizer_name: {names}.
        max_norm_clip: the global gradient norm is clipped to this; absent: no clipping.
        layer_decay: the learning rate of a weight is multiplied with this once for each layer between its own and the
            last one (layer-wise learning-rate decay); `onward plan` lists the layers. Absent: all have the same.
        optimizer_attributes: rules, or in Python a function of the weight's name.
        optimizer_int_attributes: further rules, applied after these, in which switches are 1 and 0, as ONNX Runtime's
            training runner had them; or in Python a function.
    """

    __pydantic_config__ = STRICT
    training_optimizer_name: OptimizerName = "SGDOptimizer"
    max_norm_clip: Positive | None = None
    layer_decay: PositiveShare | None = None
    optimizer_attributes: tuple[AttributeRule, ...] | AttributesOfWeight = ()
    optimizer_int_attributes: tuple[SwitchRule, ...] | AttributesOfWeight = ()

    @pydantic.field_validator("training_optimizer_name", mode="before")
    @classmethod
    def _name(cls, value: Any) -> Any:
        try:
            return optimizer_named(str(value)).name
        except KeyError:
            return value


def ratio_problem(rule: AttributeRule) -> str:
    """What is wrong with the bounds of Lamb's trust ratio; "" where nothing is."""
    if rule.ratio_min is None or rule.ratio_max is None or rule.ratio_min <= rule.ratio_max:
        return ""
    return f"ratio_min is {rule.ratio_min:g}, above ratio_max, which is {rule.ratio_max:g}."


def optimizer_problems(optimizer: Optimizer, averaging: str | None, distributed: Distributed) -> list[str]:
    """What forbids an optimizer, its attributes, or its use in a layout; a sentence each.

    Args:
        optimizer: the section.
        averaging: `averaging.kind`.
        distributed: the section.
    """
    name, kind = optimizer.training_optimizer_name, optimizer_named(optimizer.training_optimizer_name)
    known, problems = {*kind.defaults, "learning_rate_factor"}, list[str]()
    if averaging is not None and kind.averages_weights:
        problems.append(
            f"averaging.kind is {averaging}, but the optimizer {name} averages the weights itself; remove averaging, "
            "or choose another optimizer."
        )
    sharded = {
        f"distributed.zero_stage is {distributed.zero_stage}": distributed.zero_stage > 0,
        f"distributed.horizontal_parallel_size is {distributed.horizontal_parallel_size}": (
            distributed.horizontal_parallel_size > 1
        ),
    }
    problems += [
        f"optimizer.training_optimizer_name is {name}, which needs full weights on every rank, since "
        f"{kind.needs_full_weights}; {field}. Use data or pipeline parallelism without it, or another optimizer."
        for field, is_sharded in sharded.items()
        if is_sharded and kind.needs_full_weights
    ]
    for field in ("optimizer_attributes", "optimizer_int_attributes"):
        rules = getattr(optimizer, field)
        for index, rule in enumerate(rules if isinstance(rules, tuple) else ()):
            given = {
                f.name.rstrip("_")
                for f in dataclasses.fields(rule)
                if f.name != "weights" and getattr(rule, f.name) is not None
            }
            if isinstance(rule, AttributeRule) and (problem := ratio_problem(rule)):
                problems.append(f"optimizer.{field}[{index}].{problem}")
            problems += [
                f"optimizer.{field}[{index}].{attribute} is given, but {name} has no such attribute; it has: "
                f"{', '.join(sorted(known))}."
                for attribute in sorted(given - known)
            ]
    return problems
