"""Which weights get adapters: those that patterns name, or else the linear layers of repeated blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.adapters.adapted import AdaptedWeight
from onward.graph.adapters.uses import MICROSOFT, Reading, Use, uses_of
from onward.graph.nodes.known_values import integer
from onward.graph.operators import Fact, has_fact
from onward.graph.weights.frozen_weights import is_product
from onward.graph.weights.names import WeightNames
from onward.graph.weights.quantized_weights import PACKED, UNPACKING, quantized_weights
from onward.parameters.adapter import Adapter
from onward.spelling import did_you_mean

_NUMBERED = re.compile(r"^(.*[_.])?\d+$")
_PRODUCTS = frozenset({Reading.RIGHT, Reading.LEFT})


@dataclass(frozen=True, kw_only=True)
class Target:
    """A weight to adapt, and the nodes that read it."""

    adapted: AdaptedWeight
    value: ir.Value
    uses: tuple[Use, ...]


def choose_targets(
    graph: ir.Graph,
    candidates: Collection[str],
    known_as: WeightNames,
    settings: Adapter,
    is_given: Callable[[str], bool] | None = None,
) -> tuple[Target, ...]:
    """The weights that get adapters, in the order of the graph.

    Args:
        graph: prepared for lowering.
        candidates: initializers that could train, and quantized weights.
        known_as: module paths, which patterns may name.
        settings: the section `adapter`.
        is_given: whether a file to begin with adapts a weight; where there is one, it decides without patterns.

    Raises:
        ModelError: a pattern matches nothing that can have an adapter, or a rank is larger than a weight.
    """
    found = _adaptable(graph, candidates)
    if settings.targets:
        chosen = _matching(found, known_as, settings.targets)
    elif is_given is not None:
        chosen = {name: None for name in found if is_given(name)}
    else:
        chosen = linear_layers_of_blocks(found, known_as)
    if not chosen:
        integers = {
            name: use.node.op_type
            for name in quantized_weights(graph)
            for use in graph.initializers[name].uses()
            if name not in found and is_product(use.node)
        }
        if integers:
            raise ModelError(
                f"adapter.targets is empty, and {known_as.listed(integers, 2)} cannot have adapters, since "
                f"{next(iter(integers.values()))} multiplies integers by integers. Dequantize the model first (onward "
                "export MODEL --dequantize float -o FILE), and adapt the result."
            )
        raise ModelError(
            "adapter.targets is empty, and the model has no linear layers of repeated blocks to adapt. Name weights in "
            "adapter.targets; `onward inspect` lists them."
        )
    for rule in settings.rules:
        require_match(rule.weights, chosen, known_as, "adapter.rules")
    return tuple(_target(*found[name], known_as, settings) for name in found if name in chosen)


def default_targets(graph: ir.Graph, weights: Collection[str], known_as: WeightNames) -> Mapping[str, tuple[int, int]]:
    """What is adapted where nothing is named, the linear layers of repeated blocks, each with its outputs and inputs.

    Args:
        graph: prepared for lowering.
        weights: initializers that train without adapters.
        known_as: module paths.
    """
    found = _adaptable(graph, {*weights, *quantized_weights(graph)})
    chosen = linear_layers_of_blocks(found, known_as)
    return {name: _target(*found[name], known_as, Adapter(rank=1)).adapted.matrix for name in chosen}


def _adaptable(graph: ir.Graph, candidates: Collection[str]) -> dict[str, tuple[ir.Value, tuple[Use, ...]]]:
    """Weights that can have an adapter, with their uses in the order of the graph."""
    order = {node: index for index, node in enumerate(graph)}
    found = {}
    for name, value in graph.initializers.items():
        is_matrix = value.const_value is not None and len(value.const_value.shape) >= 2
        is_packed = any(use.node.op_type in PACKED | UNPACKING for use in value.uses())
        if name not in candidates or not (is_matrix or is_packed):
            continue
        uses = sorted(uses_of(value, graph), key=lambda use: order.get(use.node, len(order)))
        if uses and all(map(_is_matrix_operator, uses)):
            found[name] = value, tuple(uses)
    return found


def matches(name: str, pattern: str, known_as: WeightNames) -> bool:
    """Whether a pattern is the name of a weight, its path, a module that it is in, or the end of that module's path."""
    return known_as.matches(name, (pattern, f"{pattern}.*", f"*.{pattern}.*"))


def linear_layers_of_blocks(
    found: Mapping[str, tuple[ir.Value, Sequence[Use]]], known_as: WeightNames
) -> dict[str, None]:
    """Matrices that are only multiplied with, of modules below one with a number; where no path says so, all of them
    but the last."""
    linear = [
        name
        for name, (value, uses) in found.items()
        if all(use.reading in _PRODUCTS for use in uses) and _is_matrix(value, uses)
    ]
    inside = [name for name in linear if _is_in_block(known_as.paths.get(name, name))]
    return dict.fromkeys(inside or linear[:-1] or linear)


def _is_matrix_operator(use: Use) -> bool:
    """Whether a node multiplies matrices in one way or another: no sum with a table of positions, no norm."""
    facts = Fact.MATMUL | Fact.CONVOLUTION | Fact.RECURRENT
    return use.reading is not Reading.OTHER or has_fact(use.node.op_type, facts) or use.node.domain == MICROSOFT


def _is_matrix(value: ir.Value, uses: Sequence[Use]) -> bool:
    is_packed = uses[0].node.op_type in PACKED or any(use.node.op_type in UNPACKING for use in value.uses())
    return is_packed or (value.const_value is not None and len(value.const_value.shape) == 2)


def _is_in_block(path: str) -> bool:
    """Whether a module of a path is one of several alike and has modules of its own: `layers.0.q_proj.weight`."""
    return any(_NUMBERED.match(part) for part in re.split(r"[./]", path)[:-2])


def _matching(
    found: Mapping[str, tuple[ir.Value, Sequence[Use]]], known_as: WeightNames, patterns: Sequence[str]
) -> dict[str, None]:
    for pattern in patterns:
        require_match(pattern, found, known_as, "adapter.targets")
    return {name: None for name in found if any(matches(name, pattern, known_as) for pattern in patterns)}


def require_match(patterns: str | Sequence[str], names: Collection[str], known_as: WeightNames, field: str) -> None:
    """Refuses a pattern of a field that matches none of some names.

    Raises:
        ModelError: naming the field and the pattern.
    """
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        if not any(matches(name, pattern, known_as) for name in names):
            of = {"adapter.rules": "adapted weights", "adapter.train_too": "trainable weights"}.get(field, "matrices")
            hint = did_you_mean(pattern, known_as.everything(names))
            raise ModelError(
                f"{field}: {pattern!r} matches none of the {len(names)} {of}{hint or '.'} `onward inspect` lists the "
                "weights; a name, a module's path or a pattern with * fits."
            )


def _target(value: ir.Value, uses: tuple[Use, ...], known_as: WeightNames, settings: Adapter) -> Target:
    name, tensor, first = str(value.name), value.const_value, uses[0]
    assert tensor is not None
    assert settings.rank is not None
    rank, alpha = settings.rank, settings.alpha
    for rule in settings.rules:
        if any(
            matches(name, p, known_as) for p in ((rule.weights,) if isinstance(rule.weights, str) else rule.weights)
        ):
            rank, alpha = rule.rank or rank, rule.alpha or alpha
    shape = tuple(int(size) for size in tensor.shape.numpy())
    if first.node.op_type in PACKED:
        shape = (integer(first.node, "N", 0), integer(first.node, "K", 0))
        shape = shape if first.outputs_first else shape[::-1]
    for use in value.uses():
        if use.node.op_type in UNPACKING and use.node.outputs[0].shape is not None:
            shape = tuple(int(size) for size in use.node.outputs[0].shape.numpy())
    adapted = AdaptedWeight(
        weight=name,
        shape=shape,
        rank=rank,
        scale=settings.scale(rank, alpha),
        reading=first.reading,
        outputs_first=first.outputs_first,
        has_magnitude=settings.dora,
        is_residual=settings.start == "pissa",
        rate_factor_of_b=settings.learning_rate_ratio,
    )
    if settings.start == "pissa" and not tensor.dtype.is_floating_point():
        raise ModelError(
            f"adapter.start is 'pissa', but {known_as.shown(name)!r} is stored as integers, from which singular "
            "vectors cannot be taken out. Set adapter.start to kaiming or gaussian."
        )
    if settings.start == "pissa" and rank > min(adapted.matrix):
        raise ModelError(
            f"adapter.start is 'pissa' and adapter.rank {rank}, but {known_as.shown(name)!r} is a matrix of "
            f"{adapted.matrix[0]} outputs and {adapted.matrix[1]} inputs, which has {min(adapted.matrix)} singular "
            "vectors. Set a lower rank, for it alone in adapter.rules, or leave it out of adapter.targets."
        )
    return Target(adapted=adapted, value=value, uses=uses)
