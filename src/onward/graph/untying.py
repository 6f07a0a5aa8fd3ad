"""Weights that an exporter merged because they were equal when it ran, given back to the layers they belong to.

Exporters store equal tensors once. Freshly made biases (all zeros), scales (all ones) and layers copied from one
prototype so become one tensor; trained, it would be one weight. Weights that the model itself shares stay shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onward.graph import provenance
from onward.graph.gradients import TRAINABLE_TYPES, is_without_gradient
from onward.graph.node_writer import value_names
from onward.graph.weight_evidence import is_noted_constant
from onward.graph.weight_names import WeightNames, weight_names

_SHOWN = 8
"""So many names a note lists; the rest is counted."""

Use = tuple[ir.Node, int]
"""A node and the index of its input."""

_ROLES: dict[str, tuple[str, ...]] = {
    "LayerNormalization": ("", "weight", "bias"),
    "GroupNormalization": ("", "weight", "bias"),
    "InstanceNormalization": ("", "weight", "bias"),
    "RMSNormalization": ("", "weight"),
    "BatchNormalization": ("", "weight", "bias", "running_mean", "running_var"),
    "Conv": ("", "weight", "bias"),
    "ConvTranspose": ("", "weight", "bias"),
    "Gemm": ("", "weight", "bias"),
    "PRelu": ("", "weight"),
    "Add": ("bias", "bias"),
    "Sub": ("bias", "bias"),
    "Mul": ("weight", "weight"),
    "Div": ("weight", "weight"),
    "MatMul": ("weight", "weight"),
}
"""Operator -> what torch calls each input."""

_CONSTANT_PLACES = frozenset(
    {("LSTM", 5), ("LSTM", 6), ("GRU", 5), ("RNN", 5), ("Where", 1), ("Where", 2), ("Max", 1), ("Min", 1), ("Pow", 1)}
)
"""Inputs where an all-equal tensor is a constant and no layer's weight."""


@dataclass(frozen=True)
class _Owner:
    """Who reads a merged tensor: the weight's rebuilt name where it is known, and what tells owners apart.

    `source` is the parameter that a folded tensor was computed from for this owner, where that is known.
    """

    key: str
    name: str
    is_weight: bool
    source: str = ""


def untie_merged_weights(model: ir.Model, keep: Sequence[str] = ()) -> tuple[str, ...]:
    """Gives every layer its own copy of a float initializer that an exporter merged, in place.

    An all-equal tensor is split by module (known from the exporter's metadata or node names, else by node); any other
    tensor only where the exporter wrote down that its readers had different parameters. Uses within one module stay
    shared, as does what `keep` matches. Returns a sentence for each initializer that was untied.
    """
    notes = []
    paths = provenance.module_paths(model.graph)
    known_as = weight_names(model.graph) if keep else WeightNames()
    for name, value in list(model.graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.dtype not in TRAINABLE_TYPES or tensor.size < 2 or len(value.uses()) < 2:
            continue
        if value.is_graph_output() or known_as.matches(name, keep):
            continue
        if is_noted_constant(value):
            continue
        fill = _fill(tensor)
        made = _split_identities(model.graph, value, paths, fill is not None)
        made += _split_uses(model.graph, value, paths, fill is not None)
        if isinstance(tensor, ir.ExternalTensor):
            tensor.release()
        if made:
            what = f"all {fill:g}" if fill is not None else "equal numbers"
            more = f" and {len(made) + 1 - _SHOWN} more" if len(made) >= _SHOWN else ""
            notes.append(
                f"{name!r} (shape {[int(d) for d in tensor.shape.numpy()]}, {what}) fed {len(made) + 1} layers, merged "
                f"by the exporter; each has its own again: {', '.join([name, *made][:_SHOWN])}{more}."
            )
    return tuple(notes)


def _fill(tensor: ir.TensorProtocol) -> float | None:
    """The number that a tensor is filled with, or None where its elements differ."""
    flat = np.asarray(tensor.numpy()).reshape(-1)
    # Two elements decide nearly always, without reading the rest.
    return float(flat[0]) if flat[0] == flat[-1] and (flat == flat[0]).all() else None


def _split_identities(graph: ir.Graph, value: ir.Value, paths: frozenset[str], constant: bool) -> list[str]:
    """torch's older exporter leaves an `Identity` with the parameter's own name where it merged one."""
    made = []
    direct = next((node for node, _ in value.uses() if node.op_type != "Identity"), None)
    for node, _ in list(value.uses()):
        output = node.outputs[0]
        if node.op_type != "Identity" or node.graph is not graph or output.is_graph_output() or not output.uses():
            continue
        name = str(output.name)
        if provenance.is_automatic_name(name):
            if direct is None:
                continue
            left = provenance.path_scope(direct, paths)
            right = provenance.path_scope(next(iter(output.uses()))[0], paths)
            separate = left != right if constant else provenance.differ_in_digits_only(left, right)
        else:
            separate = constant or provenance.differ_in_digits_only(str(value.name), name)
        if separate:
            uses = list(output.uses())
            output.name = None
            _give_copy(graph, value, name, uses)
            graph.remove(node, safe=True)
            made.append(name)
    return made


def _split_uses(graph: ir.Graph, value: ir.Value, paths: frozenset[str], constant: bool) -> list[str]:
    """Copies for the readers that are not of the module (or parameter) the initializer is named after."""
    owners: dict[str, tuple[_Owner, list[Use]]] = {}
    for position, (node, index) in enumerate(value.uses()):
        owner = _owner(value, node, index, paths, position if constant else None)
        if owner is None:
            return []
        owners.setdefault(owner.key, (owner, []))[1].append((node, index))
    if len(owners) < 2:
        return []
    groups = sorted(owners.values(), key=lambda group: (group[0].name != value.name, not group[0].is_weight))
    taken = value_names(graph)
    made = []
    for owner, uses in groups[1:]:
        stem = owner.name or f"{value.name}.{uses[0][0].name or 'node'}"
        name, count = stem, 1
        while name in taken:
            count += 1
            name = f"{stem}.{count}"
        taken.add(name)
        _give_copy(graph, value, name, uses, is_weight=owner.is_weight, source=owner.source)
        made.append(name)
    return made


def _owner(value: ir.Value, node: ir.Node, index: int, paths: frozenset[str], position: int | None) -> _Owner | None:
    """Whose weight a use is; None: nobody knows. `position` is given for all-equal tensors, which are told apart by
    module or, where no module is known, by node."""
    called = provenance.called_parameters(node)
    if called:
        found = _owner_by_call(value, node, index, called)
        if found is not None:
            return found
    if not called and not provenance.module_scope(node) and provenance.KIND in value.metadata_props:
        # A part of a call (the halves of a split parameter) of which the exporter wrote nothing down.
        return _Owner(provenance.placeholder(str(value.name)), str(value.name), True)
    if position is None:
        return None
    if (node.op_type, index) in _CONSTANT_PLACES or is_without_gradient(node, index):
        return _Owner("constant", f"{value.name}.constant", False)
    role = _role(node, index)
    scope = provenance.module_scope(node)
    if scope:
        return _Owner(f"{scope}.{role}", f"{scope}.{role}", True)
    scope = provenance.path_scope(node, paths)
    if scope:
        # Without a call's text or an Identity, what torch's older exporter shares is shared by the model.
        return _Owner("shared", str(value.name), True)
    return _Owner(f"#{position}", "", True)


def _owner_by_call(value: ir.Value, node: ir.Node, index: int, called: Sequence[str]) -> _Owner | None:
    """By the text of the traced call: which of its parameters stands at this input."""
    own = str(value.name)
    sources = [source for source in provenance.folded_sources(value) if provenance.placeholder(source).count("_") > 1]
    folded = provenance.KIND not in value.metadata_props
    if folded:
        if len(sources) != 1:
            return None
        own = sources[0]
    mark = provenance.placeholder(own)
    if mark in called:
        return _Owner(mark, str(value.name), True)
    parallel = [name for name in called if provenance.differ_in_digits_only(name, mark)]
    if len(parallel) == 1:
        rebuilt = provenance.like(own, parallel[0])
        return _Owner(parallel[0], f"{rebuilt}_{value.name}" if folded else rebuilt, True, rebuilt)
    role, scope = _role(node, index), provenance.module_scope(node)
    fitting = [name for name in called if name.endswith(role)]
    if len(fitting) != 1 or not scope:
        return None
    prefix = provenance.placeholder(scope) + "_"
    attribute = fitting[0].removeprefix(prefix) if fitting[0].startswith(prefix) else role
    rebuilt = f"{scope}.{attribute}"
    return _Owner(fitting[0], f"{rebuilt}_{value.name}" if folded else rebuilt, True, rebuilt)


def _role(node: ir.Node, index: int) -> str:
    """What torch calls the parameter at an input of a node."""
    roles = _ROLES.get(node.op_type, ())
    return roles[index] if index < len(roles) and roles[index] else "weight"


def _give_copy(
    graph: ir.Graph, value: ir.Value, name: str, uses: Sequence[Use], is_weight: bool = True, source: str = ""
) -> None:
    """Registers a copy of an initializer under a name and points nodes to it; what is noted of its origin is that of
    the owner's parameter `source`."""
    tensor = value.const_value
    assert tensor is not None
    copy = ir.Value(
        name=name,
        shape=ir.Shape(tensor.shape.numpy()),
        type=ir.TensorType(tensor.dtype),
        const_value=ir.Tensor(np.array(tensor.numpy()), dtype=tensor.dtype, name=name),
        metadata_props=dict(value.metadata_props),
    )
    if not is_weight and provenance.KIND in copy.metadata_props:
        copy.metadata_props[provenance.KIND] = "CONSTANT_TENSOR"
    if source and provenance.FOLDED_FROM in copy.metadata_props:
        copy.metadata_props[provenance.FOLDED_FROM] = repr([source])
    graph.register_initializer(copy)
    for node, index in uses:
        node.replace_input_with(index, copy)
