"""Optimizers of torch.optim by the names of their classes, with the options that their constructors take."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from onward.errors import ParametersError
from onward.spelling import did_you_mean

_NOT_OPTIONS = {"self", "params", "lr", "foreach", "fused", "capturable", "differentiable", "maximize"}
"""Arguments of constructors that are set by the run, or that change only how something is computed."""


def group_of_torch_class(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the constructor takes them, lists as tuples.

    Args:
        name: `torch.optim.RAdam`.
        options: by the names of the constructor's arguments.

    Raises:
        ParametersError: the class has no such option.
    """
    known = [option for option in inspect.signature(_class(name).__init__).parameters if option not in _NOT_OPTIONS]
    for option in options:
        if option not in known:
            hint = did_you_mean(option, known)
            raise ParametersError(
                f"optimizer_attributes: options.{option} is unknown to {name}.{hint} It has: {', '.join(known)}."
            )
    return {option: tuple(value) if isinstance(value, list) else value for option, value in options.items()}


def options_of_torch_class(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a group, those that are not given with torch's defaults.

    Raises:
        ParametersError: the class has no such option, or torch refuses a value.
    """
    group: dict[str, Any] = _checked(name, [torch.zeros(())], group_of_torch_class(name, options)).param_groups[0]
    return group


def make_torch_class(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer, with the state that torch would make in the first update.

    Raises:
        ParametersError: torch refuses a value.
    """
    optimizer: torch.optim.Optimizer = _class(name)([{**group, "params": list(group["params"])} for group in groups])
    for group in groups:
        options = {key: value for key, value in group.items() if key not in ("params", "learning_rate_factor")}
        # A constructor checks its own arguments only, and makes some state of them, not of those of the groups.
        first = _checked(name, group["params"] or [torch.zeros(())], options)
        for weight in group["params"]:
            _begin(first, weight)
            optimizer.state[weight] = first.state[weight]
    return optimizer


def _checked(name: str, weights: list[Any], options: Mapping[str, Any]) -> Any:
    try:
        return _class(name)(weights, **options)
    except (TypeError, ValueError) as error:
        raise ParametersError(f"optimizer_attributes: {name} refuses these options: {error}. Change them.") from error


def _begin(optimizer: Any, weight: torch.nn.Parameter) -> None:
    """Lets torch make the state of a weight, which it does for one with a gradient, in lists for its step."""
    lists = [list[Any]() for _ in list(inspect.signature(optimizer._init_group).parameters)[1:]]
    weight.grad = torch.zeros_like(weight, memory_format=torch.preserve_format)
    optimizer._init_group({**optimizer.param_groups[0], "params": [weight]}, *lists)
    weight.grad = None


def _class(name: str) -> Any:
    return getattr(torch.optim, name.removeprefix("torch.optim."))
