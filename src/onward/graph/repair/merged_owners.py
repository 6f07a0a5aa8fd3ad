"""To which parameter a use of a merged tensor belongs, by the calls and module scopes that torch's exporter noted."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onward.graph.nodes import provenance
from onward.graph.operators import Fact, operator, operators_with
from onward.graph.repair.merged_uses import Use
from onward.graph.weights.evidence import folded_parameters
from onward.graph.weights.gradients import is_without_gradient

_CONSTANT_PLACES = frozenset({("Where", 1), ("Where", 2), ("Max", 1), ("Min", 1), ("Pow", 1)})
"""Inputs where an all-equal tensor is a constant and no layer's weight, in addition to initial states."""

_REARRANGING = operators_with(Fact.SAME_ELEMENTS | Fact.VIEW) - {"Identity"}
"""Without `Identity`, which has the name of a parameter that was merged."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Who reads a merged tensor.

    Attributes:
        key: distinguishes owners.
        name: the weight's rebuilt name, "" where it is not known.
        is_weight: false for what reads a constant or a running statistic.
        sources: the parameters that a folded tensor was computed from for this owner, where they are known.
        is_certain: the file says so.
    """

    key: str
    name: str
    is_weight: bool
    sources: tuple[str, ...] = ()
    is_certain: bool = True


def is_constant_place(node: ir.Node, index: int) -> bool:
    """Whether a tensor of one number is a constant at an input, and no layer's weight."""
    is_state = operator(node.op_type).input(index) == "state"
    return is_state or (node.op_type, index) in _CONSTANT_PLACES or is_without_gradient(node, index)


def missing_parameters(graph: ir.Graph) -> frozenset[str]:
    """Parameters that the exporter declared, and that no tensor of the file is named after or computed from.

    Where they were not dropped, they were merged.
    """
    held = {*graph.initializers, *(name.removesuffix("_quantized") for name in graph.initializers)}  # ONNX Runtime's
    for value in graph.initializers.values():
        held.update(provenance.folded_sources(value))
    dropped = {name for node in graph if provenance.lost_bias(node) for name in provenance.called_parameters(node)}
    declared = (name for name, kind in provenance.declared_kinds(graph).items() if kind == "PARAMETER")
    return frozenset(n for n in declared if n not in held and provenance.placeholder(n) not in dropped)


def find_owners(
    value: ir.Value, uses: Sequence[Use], paths: provenance.ModulePaths, missing: frozenset[str], is_filled: bool
) -> list[tuple[Owner, list[Use]]] | None:
    """Each owner with its uses, the one that the tensor is named after first; None: nobody knows one of them."""
    owners: dict[str, tuple[Owner, list[Use]]] = {}
    for position, (node, index) in enumerate(uses):
        owner = _owner(value, node, index, paths, missing, position if is_filled else None)
        if owner is None:
            return None
        owners.setdefault(owner.key, (owner, []))[1].append((node, index))
    return sorted(owners.values(), key=lambda group: (group[0].name != value.name, not group[0].is_weight))


def _owner(
    value: ir.Value,
    node: ir.Node,
    index: int,
    paths: provenance.ModulePaths,
    missing: frozenset[str],
    position: int | None,
) -> Owner | None:
    """Whose weight a use is; None: nobody knows. `position` is given for all-equal tensors, which are distinguished by
    module or, where no module is known, by node."""
    scope, role = provenance.module_scope(node), role_of(node, index)
    if node.op_type == "BatchNormalization" and index > 2:  # the calls name its statistics as buffers
        return Owner(key=f"{scope or position}.{role}", name=f"{scope}.{role}" if scope else "", is_weight=False)
    called = provenance.called_parameters(node)
    if called:
        found = _owner_by_call(value, node, index, called, missing)
        if found is not None:
            return found
    if not called and not scope and provenance.KIND in value.metadata_props:
        return _owner_by_readers(value, node, missing)
    traced = None if called else _owner_by_traced_value(value, node, missing)
    if traced is not None:
        return traced
    if position is None:
        return None
    if is_constant_place(node, index):
        return Owner(key="constant", name=f"{value.name}.constant", is_weight=False)
    if scope:
        return Owner(key=provenance.placeholder(f"{scope}.{role}"), name=f"{scope}.{role}", is_weight=True)
    scope = provenance.path_scope(node, paths)
    if scope:
        # Without a call's text or an Identity, what torch's older exporter shares is shared by the model.
        return Owner(key="shared", name=str(value.name), is_weight=True)
    return Owner(key=f"#{position}", name="", is_weight=True, is_certain=False)


def divide_joined_nodes(graph: ir.Graph, value: ir.Value, missing: frozenset[str]) -> None:
    """Gives each module its own nodes that rearrange a merged tensor (`Split`, `Transpose`), where the exporter joined
    those of several modules."""
    module, _, attribute = str(value.name).rpartition(".")
    everything = _rearranging(value)
    readers = {use.node for node in everything for output in node.outputs for use in output.uses()}
    scopes = {provenance.module_scope(reader) for reader in readers} - {"", module}
    for scope in sorted(scope for scope in scopes if f"{scope}.{attribute}" in missing):
        needed: set[ir.Node] = set()
        for node in reversed(everything):
            readers = {use.node for output in node.outputs for use in output.uses()}
            if readers & needed or any(provenance.module_scope(reader) == scope for reader in readers):
                needed.add(node)
        nodes = [node for node in everything if node in needed and provenance.module_scope(node) != scope]
        copies: dict[ir.Value | None, ir.Value] = {}
        for node in nodes:
            copy = _copied_node(node, [copies.get(one, one) for one in node.inputs], scope)
            copies.update(zip(node.outputs, copy.outputs, strict=True))
            graph.insert_before(node, copy)
        for output, copied in list(copies.items()):
            for use in [] if output is None else list(output.uses()):
                if provenance.module_scope(use.node) == scope:
                    use.node.replace_input_with(use.idx, copied)


def _copied_node(node: ir.Node, inputs: Sequence[ir.Value | None], scope: str) -> ir.Node:
    copy = ir.node(
        node.op_type, inputs, dict(node.attributes), num_outputs=len(node.outputs), name=f"{node.name}.{scope}"
    )
    for output, old in zip(copy.outputs, node.outputs, strict=True):
        output.name, output.type, output.shape = f"{old.name}.{scope}", old.type, old.shape
    return copy


def divide_joined_layers(graph: ir.Graph, missing: frozenset[str]) -> None:
    """Gives each module its own computation again, where the exporter joined those of modules with equal parameters.

    Equal layers that read one value, as the cross attentions of a decoder read the encoder's result, compute the same
    at export. A node behind such a layer was traced as reading another value than it does.
    """
    names = {output.name for node in graph for output in node.outputs}
    copies: dict[tuple[ir.Value, str], ir.Value] = {}
    for node in list(graph):
        scope = provenance.module_scope(node)
        absent = {name.removeprefix(f"{scope}.") for name in missing if name.startswith(f"{scope}.")}
        if not scope or not absent:
            continue
        read = provenance.traced_inputs(node)
        for index, value in enumerate(node.inputs):
            maker = None if value is None else value.producer()
            if value is None or maker is None or value.name in read:
                continue
            other = provenance.module_scope(maker)
            is_apart = other and not f"{scope}.".startswith(f"{other}.") and not f"{other}.".startswith(f"{scope}.")
            if is_apart and (_is_inside_call(value, maker, node) or _stands_for(value, read, names)):
                node.replace_input_with(index, _copied(graph, value, other, scope, copies))


def _is_inside_call(value: ir.Value, maker: ir.Node, node: ir.Node) -> bool:
    """Whether a value was computed within one traced call, and is read within another of the same function."""
    same = provenance.call_target(maker) == provenance.call_target(node)
    return same and provenance.is_automatic_name(str(value.name)) and provenance.call(maker) != provenance.call(node)


def _stands_for(value: ir.Value, read: Sequence[str], names: Collection[str | None]) -> bool:
    """Whether the traced call read a value of the same function that is gone."""
    own = _numbered(str(value.name))
    gone = (name for name in read if name not in names)
    return any(provenance.differ_in_digits_only(own, _numbered(name)) for name in gone)


def _numbered(name: str) -> str:
    return name if re.search(r"_\d+$", name) else f"{name}_0"


def _copied(
    graph: ir.Graph, value: ir.Value, module: str, scope: str, copies: dict[tuple[ir.Value, str], ir.Value]
) -> ir.Value:
    """What the nodes of `module` compute a value with, again for the module `scope`."""
    maker = value.producer()
    if maker is None or provenance.module_scope(maker) != module:
        return value
    if (value, scope) not in copies:
        inputs = [one if one is None else _copied(graph, one, module, scope, copies) for one in maker.inputs]
        copy = _copied_node(maker, inputs, scope)
        copy.metadata_props.update(provenance.of_module(maker, module, scope))
        copies.update({(old, scope): output for output, old in zip(copy.outputs, maker.outputs, strict=True)})
        graph.insert_after(maker, copy)
    return copies[value, scope]


def _rearranging(value: ir.Value) -> list[ir.Node]:
    """The nodes that only rearrange a stored tensor, those behind others after them."""
    found: dict[ir.Node, None] = {}
    for use in value.uses():
        if use.node.op_type in _REARRANGING and use.idx == 0:
            found[use.node] = None
            for output in use.node.outputs:
                found.update(dict.fromkeys(_rearranging(output)))
    return list(found)


def _owner_by_readers(value: ir.Value, node: ir.Node, missing: frozenset[str]) -> Owner:
    """A node of which the exporter wrote nothing down, as `Split` of a joined parameter: its readers' module."""
    name = str(value.name)
    module, _, attribute = name.rpartition(".")
    nodes = [node, *(one for output in node.outputs for one in _rearranging(output))]
    readers = {use.node for one in nodes for output in one.outputs for use in output.uses()} - set(nodes)
    scopes = {provenance.module_scope(reader) for reader in readers} - {""}
    rebuilt = f"{next(iter(scopes))}.{attribute}" if len(scopes) == 1 else ""
    if rebuilt in missing and scopes != {module}:
        return Owner(key=provenance.placeholder(rebuilt), name=rebuilt, is_weight=True)
    return Owner(key=provenance.placeholder(name), name=name, is_weight=True)


def _owner_by_traced_value(value: ir.Value, node: ir.Node, missing: frozenset[str]) -> Owner | None:
    """A folded tensor has the name of what the traced call read (`view`); another name is of another traced value."""
    name = str(value.name)
    if not provenance.folded_sources(value):
        return None
    read = provenance.traced_inputs(node)
    if name in read:
        return Owner(key=f"%{name}", name=name, is_weight=True)
    stem = re.sub(r"_\d+$", "", name)
    computed = (
        set() if node.graph is None else {one.name for one in node.inputs if one is not None and one is not value}
    )
    others = [one for one in read if re.fullmatch(rf"{re.escape(stem)}(_\d+)?", one) and one not in computed]
    if len(others) != 1:
        return None
    if not missing:  # every parameter is in the file: the same one was rearranged again
        return Owner(key=f"%{name}", name=name, is_weight=True)
    return Owner(
        key=f"%{others[0]}",
        name=others[0],
        is_weight=True,
        sources=tuple(missing) if len(missing) == 1 else (),
        is_certain=len(missing) == 1,
    )


def _owner_by_call(
    value: ir.Value, node: ir.Node, index: int, called: Sequence[str], missing: frozenset[str]
) -> Owner | None:
    """By the text of the traced call: which of its parameters is at this input."""
    folded = provenance.KIND not in value.metadata_props
    own = folded_parameters(value) if folded else [str(value.name)]
    marks, role = [provenance.placeholder(one) for one in own], role_of(node, index)
    fitting = [name for name in called if name.endswith(role) or ("_" in role and role in name)]
    # A weight and a bias of ones are one tensor, too: what is at the place decides, not that the call reads both.
    if any(mark in called and (mark in fitting or len(fitting) != 1) for mark in marks):
        return Owner(key=marks[0], name=str(value.name), is_weight=True)
    if not marks:
        return None
    scope = provenance.module_scope(node)
    rebuilt = _rebuilt_name(own, called, fitting, missing, scope, role)
    if rebuilt:
        key = provenance.placeholder(rebuilt)
        return Owner(key=key, name=f"{rebuilt}_{value.name}" if folded else rebuilt, is_weight=True, sources=(rebuilt,))
    if folded and not provenance.is_automatic_name(str(value.name)):
        return None  # what the call reads instead of the parameter was traced under a name
    names = {provenance.placeholder(name): name for name in provenance.declared_kinds(value.graph)}
    sources = tuple(names[name] for name in fitting if name in names)
    return Owner(
        key=f"{' '.join(called)} {role}", name=f"{scope}.{role}" if scope else "", is_weight=True, sources=sources
    )


def _rebuilt_name(
    own: Sequence[str], called: Sequence[str], fitting: Sequence[str], missing: frozenset[str], scope: str, role: str
) -> str:
    """The name of the parameter that stands where a tensor of the parameters `own` does, or ""."""
    mark = provenance.placeholder(own[0])
    parallel = [name for name in fitting or called if provenance.differ_in_digits_only(name, mark)]
    if len(own) == 1 and len(parallel) == 1:
        return provenance.like(own[0], parallel[0])
    absent = [name for name in missing if provenance.placeholder(name) in (fitting or called)]
    if len(absent) == 1:
        return absent[0]
    if len(fitting) != 1 or not scope:
        return ""
    prefix = provenance.placeholder(scope) + "_"
    attribute = fitting[0].removeprefix(prefix) if fitting[0].startswith(prefix) else role
    return f"{scope}.{attribute}"


def role_of(node: ir.Node, index: int) -> str:
    """What torch calls the parameter at an input of a node."""
    return operator(node.op_type).parameter_name(index) or "weight"
