"""From rules about weights to a torch optimizer: attributes of every weight, groups of equal ones, slots.

Moments exist from the first moment on, as zeros, so that every run has the same state to save and to load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pydantic
import torch
from torch import nn

from onward.errors import ParametersError
from onward.graph.weights.names import WeightNames
from onward.optim.lamb import Lamb
from onward.parameters import AttributeRule, Optimizer
from onward.parameters.checks import ATTRIBUTES_OF, ratio_problem
from onward.parameters.yaml_file import sentences

_DEFAULTS: dict[str, Any] = {
    "alpha": 0.9,
    "beta": 0.999,
    "lambda": 0.0,
    "epsilon": 1e-8,
    "momentum": 0.0,
    "nesterov": False,
    "do_bias_correction": True,
    "ratio_min": None,
    "ratio_max": None,
    "learning_rate_factor": 1.0,
}
_DEFAULTS_OF = {"Lamb": {"epsilon": 1e-6, "do_bias_correction": False}}

Attributes = Mapping[str, Any]


def attributes_of_weight(settings: Optimizer, weight: str) -> dict[str, Any]:
    """The optimizer attributes of one weight: the defaults, then every rule that matches it, in order.

    Raises:
        ParametersError: a function given as `optimizer_attributes` returns an attribute the optimizer does not have.
    """
    name = settings.training_optimizer_name
    attributes = {**_DEFAULTS, **_DEFAULTS_OF.get(name, {})}
    rules = settings.optimizer_attributes
    if callable(rules):
        known = {n.rstrip("_") for n in ATTRIBUTES_OF[name]} | {"learning_rate_factor"}
        given = _returned(rules(weight), weight)
        unknown = sorted(set(given) - known)
        if unknown:
            raise ParametersError(
                f"optimizer_attributes({weight!r}) returned {', '.join(unknown)}; "
                f"{name} has: {', '.join(sorted(known))}."
            )
        return attributes | _given(_checked_rule(given, weight))
    for rule in rules:
        if WeightNames().matches(weight, rule.weights):
            attributes |= _given(rule)
    return attributes


def _returned(attributes: Any, weight: str) -> dict[str, Any]:
    """What a function gave for a weight, by attribute; numbers of numpy and torch as Python's."""
    if not isinstance(attributes, Mapping) or not all(isinstance(name, str) for name in attributes):
        raise ParametersError(
            f"optimizer_attributes({weight!r}) returned {attributes!r}; expected a dictionary like "
            '{"lambda": 0.01}, or {} for the defaults.'
        )
    return {
        name.rstrip("_"): value.item() if isinstance(value, np.generic | torch.Tensor) and value.ndim == 0 else value
        for name, value in attributes.items()
    }


def _checked_rule(given: Mapping[str, Any], weight: str) -> AttributeRule:
    """The attributes with the types and bounds that rules of a RUN.yaml have."""
    try:
        rule = pydantic.TypeAdapter(AttributeRule).validate_python(dict(given))
    except pydantic.ValidationError as error:
        listed = " ".join(sentences(error, AttributeRule))
        raise ParametersError(f"optimizer_attributes({weight!r}) returned what is wrong: {listed}") from error
    problem = ratio_problem(rule)
    if problem:
        raise ParametersError(f"optimizer_attributes({weight!r}) returned attributes that contradict: {problem}")
    return rule


def _given(rule: AttributeRule) -> dict[str, Any]:
    names = (*_DEFAULTS, "lambda_")
    values = {name: getattr(rule, name, None) for name in names if name != "lambda"}
    return {name.rstrip("_"): value for name, value in values.items() if value is not None}


def with_exact_names(settings: Optimizer, weights: Iterable[str], known_as: WeightNames) -> Optimizer:
    """The same attributes with rules that list the initializers they match; patterns may name module paths, too."""
    rules = settings.optimizer_attributes
    if callable(rules):
        return settings
    names = tuple(weights)
    exact = tuple(replace(rule, weights=tuple(n for n in names if known_as.matches(n, rule.weights))) for rule in rules)
    return replace(settings, optimizer_attributes=exact)


def unmatched_rules(settings: Optimizer, weights: Iterable[str], known_as: WeightNames | None = None) -> list[str]:
    """Patterns of rules that match no weight: worth a word to the user, since it is often a slip."""
    if callable(settings.optimizer_attributes):
        return []
    patterns = [
        pattern
        for rule in settings.optimizer_attributes
        for pattern in ((rule.weights,) if isinstance(rule.weights, str) else rule.weights)
    ]
    names, known_as = tuple(weights), known_as or WeightNames()
    return [pattern for pattern in patterns if not any(known_as.matches(name, pattern) for name in names)]


SumOverParts = Callable[[list[torch.Tensor], torch.Tensor], torch.Tensor]


def make_optimizer(
    settings: Optimizer, weights: Mapping[str, nn.Parameter], sum_over_parts: SumOverParts | None = None
) -> torch.optim.Optimizer:
    """A torch optimizer over the weights, those with equal attributes in one group, its slots filled with zeros.

    `sum_over_parts` is for LAMB, where weights are parts of larger ones. Every group carries `learning_rate_factor`;
    the loop sets `lr` before each update.
    """
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name in weights:
        attributes = attributes_of_weight(settings, name)
        key = tuple(sorted((k, v) for k, v in attributes.items() if v is not None))
        group = groups.setdefault(key, {"params": [], "attributes": attributes})
        group["params"].append(weights[name])
    name = settings.training_optimizer_name
    if not groups:
        # torch wants a group; a rank whose stage of a pipeline is frozen has nothing for it.
        groups[()] = {"params": [], "attributes": {**_DEFAULTS, **_DEFAULTS_OF.get(name, {})}}
    torch_groups = [_torch_group(name, group) for group in groups.values()]
    if name == "Lamb":
        optimizer: torch.optim.Optimizer = Lamb(torch_groups, lr=0.0, sum_over_parts=sum_over_parts)
    else:
        optimizer = _MAKERS[name](torch_groups)
    _fill_slots(optimizer)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Sets the rate of every group, times the group's own factor."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["learning_rate_factor"]


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch's fused optimizers, which leave everything as it is where `found_inf` is 1."""
    return all(group.get("fused") for group in optimizer.param_groups)


def _torch_group(name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    a = group["attributes"]
    common = {
        "params": group["params"],
        "lr": 0.0,
        "weight_decay": a["lambda"],
        "learning_rate_factor": a["learning_rate_factor"],
    }
    if name == "SGDOptimizer":
        return {**common, "momentum": a["momentum"], "nesterov": bool(a["nesterov"])}
    common |= {"betas": (a["alpha"], a["beta"]), "eps": a["epsilon"]}
    if name == "Lamb":
        bounds = {key: a[key] for key in ("ratio_min", "ratio_max") if a[key] is not None}
        return {**common, "do_bias_correction": bool(a["do_bias_correction"]), **bounds}
    if not a["do_bias_correction"]:
        raise ParametersError(
            f"optimizer_attributes: do_bias_correction is false, which {name} of torch cannot do; "
            "use Lamb, or leave it out."
        )
    return common


def _make_sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    for group in groups:
        if group["nesterov"] and not group["momentum"]:
            raise ParametersError("optimizer_attributes: nesterov is true while momentum is 0; set a momentum.")
    return torch.optim.SGD(groups, lr=0.0, fused=True)


_MAKERS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "SGDOptimizer": _make_sgd,
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.0, fused=True),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.0, fused=True),
}


def _fill_slots(optimizer: torch.optim.Optimizer) -> None:
    """Creates the slots that torch's optimizers would create at their first step, with the values they would have."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            slots = optimizer.state[weight]
            if isinstance(optimizer, torch.optim.SGD):
                if group["momentum"]:
                    slots["momentum_buffer"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
                continue
            slots["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            slots["exp_avg"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
            slots["exp_avg_sq"] = torch.zeros_like(weight, memory_format=torch.preserve_format)


def slots_by_name(
    optimizer: torch.optim.Optimizer, weights: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, torch.Tensor]]:
    """Weight name -> slot name -> tensor."""
    return {name: dict(optimizer.state.get(weight, {})) for name, weight in weights.items()}
