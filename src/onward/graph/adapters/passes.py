"""Adapters added to a model in place: initializers `<weight>.lora_A` and `<weight>.lora_B`, and their nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.adapters.adapted import AdaptedWeight
from onward.graph.adapters.branches import Branches, operand_type
from onward.graph.adapters.inserting import Inserter
from onward.graph.adapters.start_files import StartFile, read_start
from onward.graph.adapters.starts import Start
from onward.graph.adapters.targets import Target, choose_targets, matches, require_match
from onward.graph.adapters.unpacking import unpack_products
from onward.graph.adapters.uses import Reading
from onward.graph.packed_weights.requantization import find_stored_weight
from onward.graph.shared_inputs import KEEP_APART
from onward.graph.weights.gradients import reached_by_gradient
from onward.graph.weights.names import WeightNames
from onward.graph.weights.quantized_weights import quantized_weights
from onward.parameters.adapter import Adapter


@dataclass(frozen=True, kw_only=True)
class AddedAdapters:
    """What a model trains once adapters were added; without any, what it trained before.

    Attributes:
        weights: initializers that train.
        frozen: initializers that do not, each with the reason.
        known_as: module paths, those of the adapters' tensors among them.
        adapters: weight -> its adapter.
        changed: frozen weights that lost to their adapters what these began with.
        notes: for the user.
    """

    weights: tuple[str, ...]
    frozen: Mapping[str, str]
    known_as: WeightNames
    adapters: Mapping[str, AdaptedWeight] = field(default_factory=dict)
    changed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def add_adapters(
    model: ir.Model,
    weights: tuple[str, ...],
    frozen: Mapping[str, str],
    known_as: WeightNames,
    settings: Adapter | None,
    seed: int = 0,
    roots: Sequence[str] = (),
) -> AddedAdapters:
    """Adds adapters to a model, in place, and freezes what they adapt.

    Args:
        model: prepared for lowering, or as a user's file has it.
        weights: initializers that train without adapters.
        frozen: initializers that do not, each with the reason.
        known_as: module paths of the initializers.
        settings: the section `adapter`; without a rank, nothing is added.
        seed: of the values that adapters begin with.
        roots: what gradients are taken of; none: every output.

    Raises:
        ModelError: a pattern matches nothing, a rank is too high, the model has adapters already, or no gradient
            reaches one.
    """
    if settings is None or settings.rank is None:
        return AddedAdapters(weights=weights, frozen=frozen, known_as=known_as)
    path = settings.start_path
    given = None if path is None else read_start(path, known_as, settings.module_prefix)
    unpack_products(model)
    candidates = {*weights, *quantized_weights(model.graph)}
    targets = choose_targets(model.graph, candidates, known_as, settings, None if given is None else given.holds)
    full = _trained_in_full(weights, targets, known_as, settings)
    inserter, paths = Inserter(model), dict(known_as.paths)
    anchors = {} if settings.dropout else _gather_readers(model.graph, targets)
    for target in targets:
        one = target.adapted
        dtype = operand_type(target.uses[0], target.value)
        begin = None if given is None else given.values(one)
        start = Start(
            one, _stored(model.graph, target, known_as), settings.start, seed, begin, settings.pissa_iterations
        )
        tensors = _add_tensors(inserter, target, start, dtype)
        branches = Branches(inserter, one, tensors, dtype, settings.dropout)
        for use in target.uses:
            branches.add(use, anchors.get(use.node, use.node))
        if one.weight in paths:
            paths |= {name: paths[one.weight] + name.removeprefix(one.weight) for name in one.names}
    adapters = {target.adapted.weight: target.adapted for target in targets}
    own = tuple(name for one in adapters.values() for name in one.names)
    _refuse_unreached(model.graph, adapters, roots, known_as)
    if given is not None:
        given.check_all_used(adapters, _begin_with(given, model.graph, {*weights, *own} - {*full}))
    trained = (*full, *own)
    parameters = sum(int(np.prod(shape)) for one in adapters.values() for shape in one.shapes.values())
    still = {name: "frozen under its adapter" if name in adapters else "frozen next to adapters" for name in weights}
    return AddedAdapters(
        weights=trained,
        frozen={**frozen, **{name: reason for name, reason in still.items() if name not in full}},
        known_as=WeightNames(paths),
        adapters=adapters,
        changed=tuple(adapters) if settings.start == "pissa" else (),
        notes=(
            f"adapters of {parameters:,} parameters train next to {len(adapters)} "
            f"{'weight, which is' if len(adapters) == 1 else 'weights, which are'} frozen.",
        ),
    )


def _refuse_unreached(
    graph: ir.Graph, adapters: Mapping[str, AdaptedWeight], roots: Sequence[str], known_as: WeightNames
) -> None:
    reached = reached_by_gradient(graph, roots or [str(value.name) for value in graph.outputs])
    still = [weight for weight, one in adapters.items() if reached.isdisjoint(one.names)]
    if still:
        raise ModelError(
            f"no gradient reaches the adapter{'s' if len(still) > 1 else ''} of {known_as.listed(still, 3)}: what is "
            "computed with it is rounded to integers (QLinearConv and the like), or not used by the loss. Leave it out "
            "of adapter.targets, or train the dequantized file: onward export MODEL --dequantize qdq -o FILE."
        )


def _trained_in_full(
    weights: Sequence[str], targets: Sequence[Target], known_as: WeightNames, settings: Adapter
) -> tuple[str, ...]:
    """Weights that are trained next to the adapters, as `adapter.train_too` says."""
    for pattern in settings.train_too:
        require_match(pattern, weights, known_as, "adapter.train_too")
    found = tuple(n for n in weights if any(matches(n, pattern, known_as) for pattern in settings.train_too))
    if both := [target.adapted.weight for target in targets if target.adapted.weight in found]:
        raise ModelError(
            f"adapter.train_too names {known_as.listed(both, 5)}, which adapter.targets names, too. A weight is "
            "trained in full or by an adapter: leave it out of one of the two."
        )
    return found


def _begin_with(given: StartFile, graph: ir.Graph, others: Collection[str]) -> tuple[str, ...]:
    """Gives all stored tensors but some the values of a file that was trained in full, too; which it has."""
    tensors = {
        name: value.const_value
        for name, value in graph.initializers.items()
        if value.const_value is not None and name not in others
    }
    found = given.full_values({name: tuple(tensor.shape.numpy()) for name, tensor in tensors.items()})
    for name, array in found.items():
        dtype = tensors[name].dtype
        graph.initializers[name].const_value = ir.Tensor(array.astype(dtype.numpy()), dtype=dtype, name=name)
    return tuple(found)


def _stored(graph: ir.Graph, target: Target, known_as: WeightNames) -> Callable[[], np.ndarray]:
    """What reads the values of a weight, those that integers stand for included."""
    tensor = target.value.const_value
    assert tensor is not None
    packed = None if tensor.dtype.is_floating_point() else find_stored_weight(graph, target.adapted.weight)
    if packed is None and target.adapted.has_magnitude and not tensor.dtype.is_floating_point():
        raise ModelError(
            f"adapter.dora is true, but the integers of {known_as.shown(target.adapted.weight)!r} are read by several "
            "nodes, or their scales are computed, so that its norms are not known. Set dora: false, or leave the "
            "weight out of adapter.targets."
        )
    return tensor.numpy if packed is None else packed.matrix


def _add_tensors(inserter: Inserter, target: Target, start: Start, dtype: ir.DataType) -> dict[str, ir.Value]:
    """Adds the trained tensors of one adapter, with what they begin as."""
    one = target.adapted
    makers: dict[str, Callable[[], np.ndarray]] = {one.a: start.a, one.b: start.b, one.magnitude: start.magnitude}
    found = {
        name: inserter.add_tensor(name, _lazy(makers[name], name, shape, dtype)) for name, shape in one.shapes.items()
    }
    stored = target.value.const_value
    if one.is_residual and stored is not None:
        shape = tuple(int(size) for size in stored.shape.numpy())
        target.value.const_value = _lazy(start.residual, one.weight, shape, stored.dtype)
    return found


def _lazy(make: Callable[[], np.ndarray], name: str, shape: Sequence[int], dtype: ir.DataType) -> ir.LazyTensor:
    """A tensor that is computed when it is read, and not kept."""

    def load() -> ir.TensorProtocol:
        return ir.Tensor(make().astype(dtype.numpy()), dtype=dtype, name=name)

    return ir.LazyTensor(load, dtype=dtype, shape=ir.Shape(shape), name=name)


def _gather_readers(graph: ir.Graph, targets: Sequence[Target]) -> dict[ir.Node, ir.Node]:
    """Moves products of the same input next to each other, so that they and the first halves of their branches are
    computed together; each such node -> the one that first halves go in front of."""
    groups: dict[ir.Value, list[ir.Node]] = {}
    for target in targets:
        for use in target.uses:
            data = use.node.inputs[0]
            if use.reading is Reading.RIGHT and data is not None and all(map(_is_stored, use.node.inputs[2:])):
                groups.setdefault(data, []).append(use.node)
    order = {node: index for index, node in enumerate(graph)}
    nodes, anchors = list(graph), dict[ir.Node, ir.Node]()
    for found in groups.values():
        members = sorted(dict.fromkeys(found), key=order.__getitem__)
        first = last = members[0]
        for node in members:
            between = nodes[order[first] : order[node]]
            if any(other.op_type in KEEP_APART and other not in members for other in between):
                first = node  # what is in between would wait, or its result would
            elif node is not first:
                _move(graph, node, first, last, order)
            last, anchors[node] = node, first
    return anchors


def _is_stored(value: ir.Value | None) -> bool:
    return value is None or value.is_initializer()


def _move(graph: ir.Graph, node: ir.Node, first: ir.Node, last: ir.Node, order: Mapping[ir.Node, int]) -> None:
    """Moves a node behind `last`; what makes its weight, of initializers alone, goes in front of `first`."""
    before, made = first, node.inputs[1]
    while made is not None and (maker := made.producer()) is not None and order[maker] > order[first]:
        graph.remove(maker)
        graph.insert_before(before, maker)
        before, made = maker, maker.inputs[0]
    graph.remove(node)
    graph.insert_after(last, node)


__all__ = ["AddedAdapters", "add_adapters"]
