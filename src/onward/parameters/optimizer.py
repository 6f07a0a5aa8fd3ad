"""The section `optimizer` of RUN.yaml: how gradients become weight updates, and rules for single weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pydantic

from onward.parameters.field_types import STRICT, Decay, Flag, NonNegative, Number, Positive

OptimizerName = Literal["SGDOptimizer", "Adam", "AdamW", "Lamb"]


@dataclass(frozen=True, kw_only=True)
class AttributeRule:
    """Optimizer attributes of the weights that match; a later rule wins over an earlier one, attribute by attribute.

    Attributes:
        weights: a name or `*`-pattern of initializers or module paths, or several.
        alpha, beta: decay of the first and second moment (Adam, AdamW, Lamb; 0.9, 0.999).
        lambda_: weight decay (YAML: `lambda`; 0). Adam and SGD add it to the gradient; AdamW and Lamb decouple it.
        epsilon: 1e-8; Lamb 1e-6.
        momentum, nesterov: of SGD (0, false).
        do_bias_correction: of Adam, AdamW (true) and Lamb (false).
        ratio_min, ratio_max: bounds of Lamb's trust ratio (none).
        learning_rate_factor: multiplies the learning rate for these weights (1).
    """

    __pydantic_config__ = STRICT
    weights: str | tuple[str, ...] = "*"
    alpha: Decay | None = None
    beta: Decay | None = None
    lambda_: Annotated[NonNegative | None, pydantic.Field(alias="lambda")] = None
    epsilon: NonNegative | None = None
    momentum: Decay | None = None
    nesterov: Flag | None = None
    do_bias_correction: Flag | None = None
    ratio_min: Number | None = None
    ratio_max: Number | None = None
    learning_rate_factor: NonNegative | None = None


AttributesOfWeight = Callable[[str], Mapping[str, Any]]
"""In Python, `optimizer_attributes` may be a function of the weight's name that returns its attributes."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """How gradients become updates.

    Attributes:
        training_optimizer_name: SGDOptimizer, Adam, AdamW or Lamb.
        max_norm_clip: the global gradient norm is clipped to this; absent: no clipping.
        optimizer_attributes: rules, or in Python a function of the weight's name.
    """

    __pydantic_config__ = STRICT
    training_optimizer_name: OptimizerName = "SGDOptimizer"
    max_norm_clip: Positive | None = None
    optimizer_attributes: tuple[AttributeRule, ...] | AttributesOfWeight = ()

    @pydantic.field_validator("training_optimizer_name", mode="before")
    @classmethod
    def _name(cls, value: Any) -> Any:
        names = {"sgd": "SGDOptimizer", "sgdoptimizer": "SGDOptimizer", "adamw": "AdamW", "adamwoptimizer": "AdamW"}
        names |= {"adam": "Adam", "adamoptimizer": "Adam", "lamb": "Lamb", "lamboptimizer": "Lamb"}
        return names.get(str(value).lower(), value)
