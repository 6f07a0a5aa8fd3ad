"""Weights that an exporter merged because they were equal when it ran, given back to the layers they belong to.

Exporters store equal tensors once. Freshly made biases (all zeros), scales (all ones) and layers copied from one
prototype so become one tensor; trained, it would be one weight. Weights that the model itself shares stay shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from onward.graph.nodes import provenance
from onward.graph.nodes.node_writer import TakenNames, free_name, remove_unread, value_names
from onward.graph.operators import operator
from onward.graph.reading.tensor_storage import close_file
from onward.graph.repair.merged_owners import (
    divide_joined_layers,
    divide_joined_nodes,
    find_owners,
    is_constant_place,
    missing_parameters,
    role_of,
)
from onward.graph.repair.merged_uses import Grouping, Unit, Use, UseEvidence, units_of
from onward.graph.weights.evidence import is_noted_constant
from onward.graph.weights.gradients import TRAINABLE_TYPES
from onward.graph.weights.names import WeightNames, weight_names
from onward.spelling import shortened

_SHOWN = 8
"""So many names a note lists; the rest is counted."""


@dataclass
class SplitWeights:
    """What was done.

    Attributes:
        notes: a sentence for each tensor that was split.
        undecided: tensor that stays shared though nothing says so -> a sentence, for a user who trains it.
        families: initializer -> the tensor that it was split from, or that is split; they are never tied again.
    """

    notes: list[str] = field(default_factory=list)
    undecided: dict[str, str] = field(default_factory=dict)
    families: dict[str, str] = field(default_factory=dict)


def split_merged_weights(model: ir.Model, keep: Sequence[str] = (), split: Sequence[str] = ()) -> SplitWeights:
    """Gives every layer its own copy of a float initializer that an exporter merged, in place.

    Layers are distinguished by what the exporter wrote down (traced calls, an `Identity` with the parameter's name,
    module paths), else by the other weights that they compute with. Without any of that a tensor filled with one
    number is split by node and another stays shared, and both are reported.

    Args:
        model: as it was read.
        keep: patterns of initializers, or of their module paths, that stay shared.
        split: patterns of those that are split by node where the file does not say to which layers they belong.
    """
    known_as = weight_names(model.graph) if keep or split else WeightNames()
    missing = missing_parameters(model.graph)
    if missing:
        divide_joined_layers(model.graph, missing)
        for value in model.graph.initializers.values():
            divide_joined_nodes(model.graph, value, missing)
    taken = value_names(model.graph)
    merged = [
        _Merged(graph=model.graph, taken=taken, value=value, is_asked=known_as.matches(name, split))
        for name, value in list(model.graph.initializers.items())
        if may_be_merged(value, known_as.matches(name, split)) and not known_as.matches(name, keep)
    ]
    if not merged:
        return SplitWeights(undecided=_notes_on_lost_calls(model.graph))
    uses = UseEvidence.of(model)
    # First what names and calls decide: it tells, in turn, which layers other tensors belong to.
    for one in merged:
        one.split_named(uses)
        one.split_by_calls(uses, missing)
    for is_matrix in (False, True):
        for one in merged:
            if (len(one.value.shape or ()) > 1) is is_matrix:
                one.split_by_layers(uses)
    done = SplitWeights(notes=_notes_on_joined(model.graph), undecided=_notes_on_lost_calls(model.graph))
    for one in merged:
        one.release()
        if one.made:
            done.notes.append(one.note_on_split())
            done.families |= dict.fromkeys([str(one.value.name), *one.made], str(one.value.name))
        elif not one.is_certain and not one.is_asked:
            done.undecided[str(one.value.name)] = one.note_on_sharing()
    return done


def _notes_on_joined(graph: ir.Graph) -> list[str]:
    """Parameters that are gone since a layer with equal ones computed the same at export."""
    kinds = provenance.declared_kinds(graph)
    missing = missing_parameters(graph)
    held = [name for name, kind in kinds.items() if kind == "PARAMETER" and name not in missing]
    sharing = modules_that_share(graph)
    gone = [
        name
        for name in missing
        if name.rpartition(".")[0] not in sharing and any(_is_beside(name, one) for one in held)
    ]
    if not gone:
        return []
    names = shortened([repr(name) for name in sorted(gone)], _SHOWN)
    return [
        f"{len(gone)} parameters of the module are not in the file ({names}): nothing used them, or a layer with equal "
        "numbers computed the same from the same input, and the exporter kept one of the two. They cannot be trained. "
        "If they are used, export with torch.onnx.export(..., optimize=False), or once they differ."
    ]


def modules_that_share(graph: ir.Graph) -> set[str]:
    """Modules that compute with a parameter of another module: an embedding that is the output layer, too."""
    targets = {provenance.placeholder(name): name for name in provenance.declared_kinds(graph)}
    calls = ((provenance.module_scope(node), provenance.called_parameters(node)) for node in graph)
    return {
        scope
        for scope, called in calls
        if scope and any(not targets.get(one, f"{scope}.").startswith(f"{scope}.") for one in called)
    }


def _notes_on_lost_calls(graph: ir.Graph) -> dict[str, str]:
    """Parameter -> a sentence, where the only call that reads it was traced with another one.

    Both were equal, and so was what they were used for: the other call is gone.
    """
    declared = {provenance.placeholder(name): name for name in provenance.declared_kinds(graph)}
    notes = {}
    for name, value in graph.initializers.items():
        nodes = [use.node for use in value.uses()]
        called = provenance.called_parameters(nodes[0]) if len(nodes) == 1 else ()
        is_other = called and provenance.placeholder(str(name)) not in called
        if is_other and value.metadata_props.get(provenance.KIND) == "PARAMETER":
            others = shortened([repr(declared.get(one, one)) for one in called], _SHOWN)
            notes[str(name)] = (
                f"{name!r} is read where the module reads {others}: equal layers computed the same from the same "
                "input, and the exporter kept one of them. To train both, export with torch.onnx.export(..., "
                "optimize=False), or once they differ."
            )
    return notes


def _is_beside(name: str, other: str) -> bool:
    """Whether two parameters have one name in two modules of one parent: `a.q_proj.weight`, `a.k_proj.weight`."""
    left, right = name.split("."), other.split(".")
    return left[:-2] == right[:-2] and left[-1] == right[-1] and left != right


def may_be_merged(value: ir.Value, is_asked: bool) -> bool:
    """Whether several layers may have had a tensor each that the exporter stored as this one."""
    tensor = value.const_value
    if tensor is None or tensor.dtype not in TRAINABLE_TYPES or tensor.size < 1 or len(value.uses()) < 2:
        return False
    if value.is_graph_output() or is_noted_constant(value):
        return False
    if not is_asked and all(operator(use.node.op_type).input(use.idx) == "scale" for use in value.uses()):
        return False  # the scale of what rounds a value and of what reads it is one
    if tensor.size > 1 or value.metadata_props.get(provenance.KIND) == "PARAMETER" or is_asked:
        return True
    if _changes_nothing(value):
        return True
    if not provenance.is_automatic_name(str(value.name)):
        return True
    return any(use.node.op_type == "Identity" for use in value.uses()) or _is_parameter_of_one_number(value)


def _is_parameter_of_one_number(value: ir.Value) -> bool:
    """Whether all that read it take it for a parameter; constants of the arithmetic are of one number, too."""
    uses = [use for unit in units_of(value) for use in unit.uses]
    return all(node.op_type != "MatMul" and operator(node.op_type).is_parameter(index) for node, index in uses)


def _changes_nothing(value: ir.Value) -> bool:
    """Whether all nodes multiply by a tensor of one 1, or add one 0: a parameter as it starts, hardly a constant."""
    tensor = value.const_value
    if tensor is None or tensor.size != 1 or (not value.shape and provenance.is_automatic_name(str(value.name))):
        return False
    number = float(np.asarray(tensor.numpy()).reshape(-1)[0])
    places = {1.0: {("Mul", 0), ("Mul", 1), ("Div", 1)}, 0.0: {("Add", 0), ("Add", 1), ("Sub", 1)}}.get(number, set())
    return all((use.node.op_type, use.idx) in places for use in value.uses())


def _fill(tensor: ir.TensorProtocol) -> float | None:
    """The number that a tensor is filled with, or None where its elements differ."""
    flat = np.asarray(tensor.numpy()).reshape(-1)
    # Two elements decide nearly always, without reading the rest.
    return float(flat[0]) if flat[0] == flat[-1] and (flat == flat[0]).all() else None


@dataclass(kw_only=True)
class _Merged:
    """A tensor that several nodes read, on the way to one for each layer.

    Attributes:
        taken: names of values of the graph.
        is_asked: whether the user wants it split.
        fill: the number it is filled with.
        made: names of the copies so far.
        is_certain: whether the file says so much.
    """

    graph: ir.Graph
    taken: TakenNames
    value: ir.Value
    is_asked: bool
    fill: float | None = field(init=False)
    made: list[str] = field(default_factory=list)
    is_certain: bool = True
    is_done: bool = False
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        assert self.value.const_value is not None
        self.fill = _fill(self.value.const_value)
        self.shape = tuple(int(size) for size in self.value.const_value.shape.numpy())

    @property
    def _splits_by_node(self) -> bool:
        return self.fill is not None or self.is_asked

    def split_named(self, evidence: UseEvidence) -> None:
        """torch's older exporter leaves an `Identity` with the parameter's own name where it merged one."""
        for unit in units_of(self.value):
            if evidence.is_named(unit, self._splits_by_node):
                self._give([unit], unit.alias)

    def split_by_calls(self, evidence: UseEvidence, missing: frozenset[str]) -> None:
        """By the calls that torch's newer exporter wrote down."""
        uses = list(self.value.uses())
        self.is_done = len(uses) < 2
        if self.is_done or not any(_is_noted(node) for node, _ in uses):
            return
        self.is_done = True
        owners = find_owners(self.value, uses, evidence.paths, missing, self._splits_by_node)
        for owner, used in (owners or [])[1:]:
            self._give([Unit(tuple(used))], owner.name, owner.is_weight, owner.sources)
            self.is_certain = self.is_certain and owner.is_certain

    def split_by_layers(self, evidence: UseEvidence) -> None:
        """By modules, or by what else the layers compute with."""
        is_number = self.value.const_value is not None and self.value.const_value.size == 1
        if self.is_done:
            return
        if is_number and not self.is_asked and not _is_parameter_of_one_number(self.value):
            is_named = not provenance.is_automatic_name(str(self.value.name))
            self.is_certain = not is_named and not _changes_nothing(self.value)
            return
        units = units_of(self.value)
        if self._splits_by_node:
            constants = [unit for unit in units if is_constant_place(*unit.uses[0])]
            if constants and len(constants) < len(units):
                self._give(constants, f"{self.value.name}.constant", is_weight=False)
            units = [unit for unit in units if unit not in constants]
        if len(units) < 2:
            return
        found: Grouping = evidence.group(self.value, units, self.fill is not None, self.is_asked)
        self.is_certain = found.is_certain
        for group in found.groups[1:]:
            self._give(group, self._name(group, evidence))

    def _name(self, group: Sequence[Unit], evidence: UseEvidence) -> str:
        alias = next((unit.alias for unit in group if unit.alias), "")
        if alias:
            return alias
        node, index = group[0].uses[0]
        site = provenance.call_site(node, evidence.paths)
        if site is None or not site[0]:
            return ""
        folded = provenance.is_automatic_name(str(self.value.name))
        return f"{site[0]}.{role_of(node, index)}{f'_{self.value.name}' if folded else ''}"

    def _give(self, units: Sequence[Unit], stem: str, is_weight: bool = True, sources: Sequence[str] = ()) -> None:
        uses = [use for unit in units for use in unit.uses]
        identities = [unit.identity for unit in units if unit.identity is not None]
        for node in identities:
            self.taken.discard(str(node.outputs[0].name))
            node.outputs[0].name = f"{node.outputs[0].name}_merged"
            self.taken.add(str(node.outputs[0].name))
        name = free_name(stem or f"{self.value.name}.{uses[0][0].name or 'node'}", self.taken, ".")
        _give_copy(self.graph, self.value, name, uses, is_weight, sources)
        for node in identities:
            remove_unread(self.graph, node.outputs[0])
        self.made.append(name)

    def release(self) -> None:
        """Lets go of the bytes of an external tensor."""
        close_file(self.value.const_value)

    def note_on_sharing(self) -> str:
        """Who reads it, and what to do where they do not share it."""
        name = str(self.value.name)
        readers = [repr(provenance.shown_node(unit.first)) for unit in units_of(self.value)]
        return (
            f"{name!r} (shape {list(self.shape)}) is read by {len(readers)} nodes ({shortened(readers, _SHOWN)}); the "
            "file does not tell whether they share it, or were equal and merged when it was exported. It trains as one "
            f"weight. If they are separate layers, list {name!r} in training.untied_weights (untied_weights=[...] of "
            "onward.to_torch)."
        )

    def note_on_split(self) -> str:
        """What was done to it, and what to do where the file does not tell."""
        name, shape = str(self.value.name), list(self.shape)
        what = f"all {self.fill:g}" if self.fill is not None else "equal numbers"
        done = (
            f"{name!r} (shape {shape}, {what}) fed {len(self.made) + 1} layers, merged by the exporter; each has its "
            f"own again: {shortened([name, *self.made], _SHOWN)}."
        )
        if self.is_certain:
            return done
        return (
            f"{done} The file does not tell for certain which of them are one layer: if they share a weight, list "
            f"{name!r} in training.tied_weights (tied_weights=[...] of onward.to_torch)."
        )


def _is_noted(node: ir.Node) -> bool:
    """Whether torch's newer exporter wrote down which call a node, or what reads it, is of."""
    if provenance.call(node):
        return True
    return any(provenance.call(use.node) for output in node.outputs for use in output.uses())


def _give_copy(
    graph: ir.Graph,
    value: ir.Value,
    name: str,
    uses: Sequence[Use],
    is_weight: bool = True,
    sources: Sequence[str] = (),
) -> None:
    """Registers a copy of an initializer under a name and points nodes to it; what is noted of its origin is that of
    the owner's parameters `sources`."""
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
    if sources and provenance.FOLDED_FROM in copy.metadata_props:
        copy.metadata_props[provenance.FOLDED_FROM] = repr(list(sources))
    graph.register_initializer(copy)
    for node, index in uses:
        node.replace_input_with(index, copy)
