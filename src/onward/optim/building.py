"""From rules about weights to a torch optimizer: attributes of every weight, groups of equal ones, slots.

Moments exist from the first moment on, as zeros, so that every run has the same state to save and to load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pydantic
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from onward.errors import ParametersError
from onward.graph.training_graph import TrainingGraph
from onward.graph.weights.hidden_matrices import hidden_matrices
from onward.graph.weights.names import WeightNames
from onward.optim.makers import MAKERS
from onward.optim.weight_shards import UNSHARDED, WeightShards
from onward.optimizers.registry import optimizer_named
from onward.parameters import AttributeRule, Optimizer
from onward.parameters.optimizer import SwitchRule, ratio_problem
from onward.parameters.yaml_file import sentences
from onward.plan.layers import find_layers
from onward.untrusted_files import validated

Attributes = Mapping[str, Any]
_FIELDS = ("optimizer_attributes", "optimizer_int_attributes")
"""Of the parameters, in the order in which they apply."""


def default_attributes(settings: Optimizer) -> dict[str, Any]:
    """The attributes of a weight that no rule matches."""
    return {**optimizer_named(settings.training_optimizer_name).defaults, "learning_rate_factor": 1.0}


def attributes_of_weight(settings: Optimizer, weight: str) -> dict[str, Any]:
    """The optimizer attributes of one weight: the defaults, then every rule that matches it, in order.

    Raises:
        ParametersError: a function given as `optimizer_attributes` returns an attribute the optimizer does not have.
    """
    attributes = default_attributes(settings)
    for field in _FIELDS:
        rules = getattr(settings, field)
        if callable(rules):
            rules = (_asked(settings, field, weight),)
        for rule in rules:
            if WeightNames().matches(weight, rule.weights):
                given = _given(rule)
                if "options" in given:
                    given["options"] = {**attributes["options"], **given["options"]}
                attributes |= given
    return attributes


def _asked(settings: Optimizer, field: str, weight: str) -> AttributeRule | SwitchRule:
    """What a function of the user's gives for a weight, as a rule for it."""
    name, call = settings.training_optimizer_name, f"{field}({weight!r})"
    known = set(default_attributes(settings))
    given = _returned(getattr(settings, field)(weight), call)
    unknown = sorted(set(given) - known)
    if unknown:
        raise ParametersError(f"{call} returned {', '.join(unknown)}; {name} has: {', '.join(sorted(known))}.")
    return _checked_rule(given, call, weight, AttributeRule if field == _FIELDS[0] else SwitchRule)


def _returned(attributes: Any, call: str) -> dict[str, Any]:
    """What a function gave for a weight, by attribute; numbers of numpy and torch as Python's."""
    if not isinstance(attributes, Mapping) or not all(isinstance(name, str) for name in attributes):
        raise ParametersError(
            f'{call} returned {attributes!r}; expected a dictionary like {{"lambda": 0.01}}, or {{}} for the defaults.'
        )
    return {
        name.rstrip("_"): value.item() if isinstance(value, np.generic | torch.Tensor) and value.ndim == 0 else value
        for name, value in attributes.items()
    }


def _checked_rule(
    given: Mapping[str, Any], call: str, weight: str, kind: type[AttributeRule] | type[SwitchRule]
) -> AttributeRule | SwitchRule:
    """The attributes with the types and bounds that rules of a RUN.yaml have."""
    try:
        rule: AttributeRule | SwitchRule = validated(kind, {**given, "weights": (weight,)})
    except pydantic.ValidationError as error:
        listed = " ".join(sentences(error, kind))
        raise ParametersError(f"{call} returned what is wrong: {listed}") from error
    problem = ratio_problem(rule) if isinstance(rule, AttributeRule) else ""
    if problem:
        raise ParametersError(f"{call} returned attributes that contradict: {problem}")
    return rule


def _given(rule: AttributeRule | SwitchRule) -> dict[str, Any]:
    """The attributes that a rule sets."""
    values = {one.name.rstrip("_"): getattr(rule, one.name) for one in fields(rule) if one.name != "weights"}
    return {name: value for name, value in values.items() if value is not None}


def with_exact_names(settings: Optimizer, graph: TrainingGraph) -> Optimizer:
    """The same attributes as rules that list the initializers they match; patterns may name module paths, too.

    What the graph decides comes first, so that rules overrule it. All ranks must call this with the entire graph, since
    a rank's part of it does not show what is an embedding or a last layer.
    """
    names, known_as, exact = graph.weights, graph.known_as, list[AttributeRule]()
    if "use_muon" in default_attributes(settings):
        exact.append(AttributeRule(weights=hidden_matrices(graph.model.graph, names), use_muon=True))
    for adapted in graph.adapters.values():
        if adapted.rate_factor_of_b != 1.0:
            exact.append(AttributeRule(weights=(adapted.b,), learning_rate_factor=adapted.rate_factor_of_b))
    for field in _FIELDS:
        rules = getattr(settings, field)
        if callable(rules):
            rules = [_asked(settings, field, name) for name in names]
        for rule in rules:
            matched = tuple(name for name in names if known_as.matches(name, rule.weights))
            exact.append(AttributeRule(weights=matched, **_by_field(_given(rule))))
    settings = replace(settings, optimizer_attributes=tuple(exact), optimizer_int_attributes=())
    return settings if settings.layer_decay is None else _with_layer_decay(settings, graph, settings.layer_decay)


def _with_layer_decay(settings: Optimizer, graph: TrainingGraph, decay: float) -> Optimizer:
    """The same with rules that multiply the factors of the learning rate by those of the layers."""
    by_factor: dict[float, list[str]] = {}
    for name, factor in find_layers(graph).factors(decay).items():
        own = attributes_of_weight(settings, name)["learning_rate_factor"]
        by_factor.setdefault(own * factor, []).append(name)
    rules = [AttributeRule(weights=tuple(names), learning_rate_factor=f) for f, names in by_factor.items()]
    exact = settings.optimizer_attributes
    assert isinstance(exact, tuple)
    return replace(settings, layer_decay=None, optimizer_attributes=(*exact, *rules))


def _by_field(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {"lambda_" if name == "lambda" else name: value for name, value in attributes.items()}


def unmatched_rules(settings: Optimizer, weights: Iterable[str], known_as: WeightNames | None = None) -> list[str]:
    """Patterns of rules that match no weight: worth a word to the user, since it is often a slip."""
    rules = [rule for field in _FIELDS if not callable(getattr(settings, field)) for rule in getattr(settings, field)]
    patterns = [
        pattern for rule in rules for pattern in ((rule.weights,) if isinstance(rule.weights, str) else rule.weights)
    ]
    names, known_as = tuple(weights), known_as or WeightNames()
    return [pattern for pattern in patterns if not any(known_as.matches(name, pattern) for name in names)]


def make_optimizer(
    settings: Optimizer,
    weights: Mapping[str, nn.Parameter],
    shards: WeightShards = UNSHARDED,
    initial_lr: float = 0.0,
) -> torch.optim.Optimizer:
    """A torch optimizer over the weights, those with equal attributes in one group, its slots filled.

    Every group carries `learning_rate_factor`; the loop sets `lr` before each update.

    Args:
        settings: section `optimizer`.
        weights: by name.
        shards: what the weights are shards of.
        initial_lr: the rate with which state begins that depends on one (that of torch's Rprop and ASGD).
    """
    groups: dict[tuple[Any, ...], tuple[Attributes, list[nn.Parameter]]] = {}
    for name in weights:
        attributes = attributes_of_weight(settings, name)
        _check_muon(name, attributes, shards.full_shape(weights[name]))
        key = tuple(sorted((name, repr(value)) for name, value in attributes.items() if value is not None))
        groups.setdefault(key, (attributes, []))[1].append(weights[name])
    # torch wants a group; a rank whose stage of a pipeline is frozen has nothing for it.
    found = list(groups.values()) or [(default_attributes(settings), [])]
    maker = MAKERS[settings.training_optimizer_name]
    torch_groups = [
        {"params": held, "lr": initial_lr * factor, "learning_rate_factor": factor, **maker.group(a)}
        for a, held in found
        for factor in (a["learning_rate_factor"],)
    ]
    return maker.make(torch_groups, shards)


def _check_muon(name: str, attributes: Attributes, shape: tuple[int, ...]) -> None:
    if attributes.get("use_muon") and len(shape) != 2:
        raise ParametersError(
            f"optimizer_attributes: use_muon is true for {name!r}, whose shape is {list(shape)}; Muon updates "
            "matrices, which have two axes. Remove it for this weight, and AdamW updates it."
        )


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Sets the rate of every group, times the group's own factor."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["learning_rate_factor"]


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch's fused optimizers, which leave everything as it is where `found_inf` is 1."""
    return all(group.get("fused") for group in optimizer.param_groups)


def slots_by_name(
    optimizer: torch.optim.Optimizer, weights: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, torch.Tensor]]:
    """Weight name -> slot name -> tensor; of a tensor that consists of several, `<slot>.<part>` -> each of them."""
    return {name: _parts(optimizer.state.get(weight, {})) for name, weight in weights.items()}


def _parts(slots: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    found = dict[str, torch.Tensor]()
    for slot, tensor in slots.items():
        if is_traceable_wrapper_subclass(tensor):
            found |= {f"{slot}.{part}": getattr(tensor, part) for part in tensor.__tensor_flatten__()[0]}
        else:
            found[slot] = tensor
    return found
