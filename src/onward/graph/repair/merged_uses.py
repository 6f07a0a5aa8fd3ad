"""Which uses of a merged tensor belong to one parameter of the exported module, where no traced call names it.

torch's older exporter leaves an `Identity` for each tensor that it merged, and module paths as node names; where both
are gone, the tensors that a layer computes with in addition to the merged one distinguish layers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onward.graph.nodes import provenance
from onward.graph.nodes.rearrangement import is_equal
from onward.graph.operators import Fact, operators_with

Use = tuple[ir.Node, int]
"""A node and the index of its input."""

_MOVING = operators_with(Fact.SAME_ELEMENTS) | {"Cast"}
_LINEAR = operators_with(Fact.MATMUL | Fact.CONVOLUTION)
_SHIFTING = frozenset({"Add", "Sub", "Mul", "Div"})
_UNSCOPED_IDENTITY = re.compile(r"(Identity_\d+)?$")


@dataclass(frozen=True)
class Unit:
    """Uses that the file keeps together: one that reads the tensor itself, or all behind one `Identity`.

    Attributes:
        uses: of the tensor, or of the `Identity`'s output.
        identity: between them and the tensor.
    """

    uses: tuple[Use, ...]
    identity: ir.Node | None = None

    @property
    def alias(self) -> str:
        """The tensor's name behind the `Identity`, or ""."""
        return "" if self.identity is None else str(self.identity.outputs[0].name)

    @property
    def first(self) -> ir.Node:
        """The node that stands for the unit."""
        return self.uses[0][0]


@dataclass(frozen=True)
class Grouping:
    """Units by the parameter that they belong to.

    Attributes:
        groups: the first keeps the tensor.
        is_certain: the file says so; else it was concluded from how such files usually come about.
    """

    groups: Sequence[Sequence[Unit]]
    is_certain: bool = True


def units_of(value: ir.Value) -> list[Unit]:
    """The uses of a tensor; those behind an `Identity` that the older exporter may have put there belong together."""
    return [one for use in value.uses() for one in _units_of(use, value.graph)]


def _units_of(use: Use, graph: object) -> Iterator[Unit]:
    node, output = use[0], use[0].outputs[0]
    is_alias = node.op_type == "Identity" and node.domain == "" and node.graph is graph and not provenance.call(node)
    if not is_alias or not output.uses() or output.is_graph_output():
        yield Unit((use,))
        return
    direct = tuple(later for later in output.uses() if later.node.op_type != "Identity")
    if direct:
        yield Unit(direct, node)
    for later in output.uses():  # what was merged in two passes has an Identity behind another
        if later not in direct:
            yield from _units_of(later, graph)


@dataclass(frozen=True)
class UseEvidence:
    """What is known of a graph's nodes and the layers that they belong to.

    Attributes:
        paths: every prefix of the node names of torch's older exporter.
        order: the position of every node.
        keeps_identities: the older exporter's `Identity` nodes are still there: what several modules read without one
            is shared by them.
    """

    paths: provenance.ModulePaths
    order: Mapping[ir.Node, int]
    keeps_identities: bool

    @classmethod
    def of(cls, model: ir.Model) -> UseEvidence:
        """Reads names and order of all nodes."""
        nodes = list(model.graph)
        paths = provenance.ModulePaths.of(model.graph)
        by_torch = model.producer_name == "pytorch"
        keeps = by_torch and any(_is_made_by_merging(node) for node in nodes)
        return cls(paths, {node: place for place, node in enumerate(nodes)}, keeps)

    def is_named(self, unit: Unit, is_filled: bool) -> bool:
        """Whether an `Identity` has the name of a parameter: torch's older exporter put it where it merged one.

        Tensors of different numbers are no evidence of merging by themselves, as those of one number are.
        """
        if not unit.alias or provenance.is_automatic_name(unit.alias):
            return False
        assert unit.identity is not None
        is_made = self.keeps_identities and _is_made_by_merging(unit.identity)
        return is_filled or is_made or "." in unit.alias

    def group(self, value: ir.Value, units: Sequence[Unit], is_filled: bool, is_asked: bool = False) -> Grouping:
        """The units of a merged tensor by parameter, by the modules of their nodes, else by the layers.

        Args:
            value: the tensor.
            units: of its uses.
            is_filled: it is filled with one number.
            is_asked: it is to be split wherever the file does not speak against it.
        """
        is_filled = is_filled or is_asked
        own = [unit for unit in units if unit.identity is None]
        is_named = not provenance.is_automatic_name(str(value.name))
        if is_named and self.keeps_identities and len(own) == len(units):
            return Grouping([units])
        sites = [provenance.call_site(unit.first, self.paths) for unit in units]
        known = [site for site in sites if site is not None]
        if len(known) == len(units):
            found = self._by_module(value, units, known, is_filled)
        else:
            found = _by_layer(value, units, is_filled, is_asked)
        if not own or not is_named:
            return found
        if not self.keeps_identities:
            groups = sorted(found.groups, key=lambda group: not any(unit in own for unit in group))
            return Grouping(groups, found.is_certain)
        first = [unit for group in found.groups if any(unit in own for unit in group) for unit in group]
        rest = [group for group in found.groups if not any(unit in own for unit in group)]
        return Grouping([first, *rest], found.is_certain)

    def _by_module(
        self, value: ir.Value, units: Sequence[Unit], sites: Sequence[tuple[str, str]], is_filled: bool
    ) -> Grouping:
        """A module that is called again reads its parameters in the same order as before.

        In one call, equal tensors of one number are several (the parts of a joined bias); others are one, but for the
        inputs of one node. Whether they are is certain only where an `Identity` would tell.
        """
        in_order = sorted(range(len(units)), key=lambda i: self.order.get(units[i].first, 0))
        read: Counter[str] = Counter()
        reads = Counter(unit.first for unit in units)
        groups: dict[tuple[str, int], list[Unit]] = {}
        is_certain = True
        for i in in_order:
            module, call = sites[i]
            place = read[call] if is_filled else units[i].uses[0][1] if reads[units[i].first] > 1 else 0
            is_known = not is_filled and self.keeps_identities and units[i].identity is None
            is_certain = is_certain and (is_known or not read[call])
            read[call] += 1
            groups.setdefault((module, place), []).append(units[i])
        if is_filled:
            return Grouping(_named_first(value, groups), is_certain)
        found = _joined(value, _named_first(value, groups), [site[0] for site in sites])
        return Grouping(found.groups, found.is_certain and is_certain)


def _is_made_by_merging(node: ir.Node) -> bool:
    read = node.inputs[0] if node.op_type == "Identity" else None
    return read is not None and read.is_initializer() and _UNSCOPED_IDENTITY.match(node.name or "") is not None


def _named_first(value: ir.Value, groups: Mapping[tuple[str, int], list[Unit]]) -> list[list[Unit]]:
    """The module that the tensor is named after first; else the first reader."""
    module = str(value.name).rpartition(".")[0]

    def rank(key: tuple[str, int]) -> bool:
        return not module or key[0] != module

    return [groups[key] for key in sorted(groups, key=rank)]


def _joined(value: ir.Value, groups: list[list[Unit]], modules: Sequence[str]) -> Grouping:
    """Of several modules that read equal numbers, those that share the parameter; the others are copies of one."""
    inside = any(a != b and (b + ".").startswith(a + "." if a else "") for a in modules for b in modules)
    joined: list[list[Unit]] = []
    is_certain, is_matrix = True, value.shape is not None and len(value.shape) > 1
    for group in groups:
        for other in joined:
            verdict = True if inside else _share(value, other, group)
            if verdict and not inside and _is_alike(value, other[0], group[0]):
                # All that the two layers read is merged: two that share it all would be one under one path.
                verdict = is_certain = False
            is_certain = is_certain and verdict is not None and not (is_matrix and not verdict)
            if verdict is None:  # without an Identity, the file has nothing that speaks for two
                verdict = all(unit.identity is None for unit in (*other, *group))
            if verdict:
                other.extend(group)
                break
        else:
            joined.append(list(group))
    return Grouping(joined, is_certain)


def _share(value: ir.Value, left: Sequence[Unit], right: Sequence[Unit]) -> bool | None:
    """Whether two layers share a matrix of different numbers; None: nothing tells.

    An embedding shares its table with another layer; copies of one layer have equal biases, too, and layers that share
    a matrix only have not, unless those were equal at export: that two do not share is concluded, never certain.
    """
    if value.shape is None or len(value.shape) < 2:
        return False
    looked_up = [any(node.op_type == "Gather" for unit in units for node, _ in unit.uses) for units in (left, right)]
    if any(looked_up):
        return None if all(looked_up) else True
    ours, theirs = companions(value, left[0]), companions(value, right[0])
    if not ours or not theirs:
        return None
    if {id(one) for one in ours} & {id(one) for one in theirs}:
        return True
    equal = [one for one in ours for other in theirs if is_equal(_numbers(one), _numbers(other))]
    return None if equal and not any(_varies(one) for one in equal) else not equal


def _is_alike(value: ir.Value, left: Unit, right: Unit) -> bool:
    """Whether two layers read the same stored tensors alone, all under names that the exporter made up."""
    ours, theirs = ({id(one): one for one in companions(value, unit)} for unit in (left, right))
    names = (str(one.name) for one in (value, *ours.values()))
    return bool(ours) and ours.keys() == theirs.keys() and all(map(provenance.is_automatic_name, names))


def _by_layer(value: ir.Value, units: Sequence[Unit], is_filled: bool, is_asked: bool) -> Grouping:
    """Without modules: nodes that compute with the same other tensors are calls of one layer."""
    nearby = [frozenset(id(one) for one in companions(value, unit) if _is_distinctive(one, is_asked)) for unit in units]
    if is_filled:
        groups: dict[object, list[Unit]] = {}
        for place, (unit, others) in enumerate(zip(units, nearby, strict=True)):
            groups.setdefault(others or place, []).append(unit)
        return Grouping(list(groups.values()), is_certain=False)
    joined: list[list[Unit]] = []
    is_certain = True
    for unit in units:
        for other in joined:
            verdict = _share(value, other, [unit])
            is_vector = value.shape is not None and len(value.shape) < 2
            is_certain = is_certain and verdict is True and not is_vector
            if verdict is None or is_vector:
                verdict = True
            if verdict:
                other.append(unit)
                break
        else:
            joined.append([unit])
    # One layer that is called twice, and two that started equal, look the same: both tensors are merged.
    return Grouping(joined, is_certain and len(joined) > 1)


def _is_distinctive(value: ir.Value, is_asked: bool) -> bool:
    """A tensor that several nodes read may be merged itself, above all one of one number."""
    return len(value.uses()) == 1 or (_varies(value) and not is_asked)


def companions(value: ir.Value, unit: Unit) -> list[ir.Value]:
    """The stored tensors that the layers of a unit compute with in addition to a merged one: to a bias the weight, and
    back.
    """
    found: dict[int, ir.Value] = {}
    for node, index in unit.uses:
        for other in _beside(node, index):
            stored = _stored(other)
            if stored is not None and stored is not value:
                found[id(stored)] = stored
    return list(found.values())


def _beside(node: ir.Node, index: int) -> Iterator[ir.Value]:
    if node.op_type in _MOVING and node.outputs:
        for later in node.outputs[0].uses():
            yield from _beside(later.node, later.idx)
        return
    if node.op_type not in _SHIFTING:
        yield from (one for place, one in enumerate(node.inputs[1:], 1) if one is not None and place != index)
        if node.op_type in _LINEAR:
            for later in node.outputs[0].uses():
                if later.node.op_type == "Add":
                    yield from (one for place, one in enumerate(later.node.inputs) if one and place != later.idx)
        return
    other = node.inputs[1 - index] if len(node.inputs) == 2 else None
    maker = None if other is None else other.producer()
    if maker is not None and maker.op_type in _LINEAR:
        yield from (one for one in maker.inputs[1:] if one is not None)


def _stored(value: ir.Value | None) -> ir.Value | None:
    """The initializer that a value is, as it is or rearranged."""
    for _ in range(4):
        if value is None or value.is_initializer():
            break
        maker = value.producer()
        value = maker.inputs[0] if maker is not None and maker.op_type in _MOVING else None
    return value if value is not None and value.const_value is not None else None


def _varies(value: ir.Value) -> bool:
    array = _numbers(value).reshape(-1)
    return bool((array != array[:1]).any())


def _numbers(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return value.const_value.numpy()
