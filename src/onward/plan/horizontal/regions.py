"""Regions: all that must be cut together, grown from one cut until every path ends in a sum over the ranks.

A region begins at the output axis of a product with a weight, or at the rows of a table. Cuts spread to every node that
reads or computes a cut value, and back to whatever must be cut with it: other weights, masks, other products.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

import onward.plan.horizontal.rules_context
import onward.plan.horizontal.rules_elementwise
import onward.plan.horizontal.rules_fused
import onward.plan.horizontal.rules_linear
import onward.plan.horizontal.rules_movement  # noqa: F401  (importing registers the rules)
from onward.graph.fusion.rewriting import DOMAIN as FUSED
from onward.graph.nodes.structure import label
from onward.graph.training_graph import TrainingGraph
from onward.graph.weights.gradients import TRAINABLE_TYPES, is_without_gradient
from onward.plan.horizontal.cuts import Assignment, CannotShardError, Facts, NodeContext, Replace, Sizes, unlimited
from onward.plan.horizontal.rules import apply_rule
from onward.plan.shards import Sharding

MATMUL_OPERATORS = {"MatMul": (0, 1), "Gemm": (0, 1), "Linear": (1,), "Conv": (1,), "ConvTranspose": (1,),
                    "Einsum": (0, 1, 2)}  # fmt: skip
"""Operators that multiply by a weight -> inputs that may be the weight; `Linear` is of the domain `onward.fused`."""

_MOST_TRIES = 12


class PartitioningContext:
    """A training graph as regions see it: facts, and which values depend on weights and on inputs.

    Attributes:
        own: initializers that are cut with everything that reads them: weights, running statistics, frozen weights.
    """

    def __init__(
        self, graph: TrainingGraph, shapes: Mapping[str, Sizes], numbers: Mapping[str, object] | None = None
    ) -> None:
        self.graph = graph
        self.main = graph.model.graph
        self.opsets = graph.model.opset_imports
        self.nodes = list(self.main)
        self.order = {node: place for place, node in enumerate(self.nodes)}
        inputs = {value for value in self.main.inputs if not value.is_initializer()}
        from_inputs = self._reached(inputs, through_all=True)
        self.facts = Facts(
            shapes=shapes, numbers=numbers or {}, from_inputs=frozenset(str(value.name) for value in from_inputs)
        )
        trained = {self.main.initializers[name] for name in graph.weights}
        self.own = trained | {self.main.initializers[name] for name in graph.states} | self._frozen_weights(trained)
        self.from_weights = self._reached(self.own, through_all=False)
        self.trained = self._reached(trained, through_all=False)

    def context(self, node: ir.Node) -> NodeContext:
        """A node with what is known of its values."""
        return NodeContext(node, self.opsets.get(node.domain, 1), self.facts)

    def is_free(self, value: ir.Value) -> bool:
        """Whether a value follows from data and constants alone, so that a part of it can be taken at no cost."""
        return value not in self.from_weights

    def needs_gradient(self, node: ir.Node, index: int) -> bool:
        """Whether training sends a gradient back through an input of a node."""
        value = node.inputs[index]
        if value is None or value not in self.trained or is_without_gradient(node, index):
            return False
        return value.dtype is None or value.dtype in TRAINABLE_TYPES

    def _reached(self, roots: Collection[ir.Value], through_all: bool) -> set[ir.Value]:
        found = set(roots)
        for node in self.nodes:
            reads = [(i, value) for i, value in enumerate(node.inputs) if value is not None]
            nested = [v for inner in _nested_nodes(node) for v in inner.inputs if v is not None]
            passing = any(v in found and (through_all or not is_without_gradient(node, i)) for i, v in reads)
            if passing or any(value in found for value in nested):
                found.update(node.outputs)
        return found

    def _frozen_weights(self, trained: set[ir.Value]) -> set[ir.Value]:
        found = set()
        for node in self.nodes:
            for index in MATMUL_OPERATORS.get(node.op_type, ()) if node.domain in ("", FUSED) else ():
                value = node.inputs[index] if index < len(node.inputs) else None
                while value is not None and value.producer() is not None and len(value.producer().inputs) == 1:  # type: ignore[union-attr]
                    value = value.producer().inputs[0]  # type: ignore[union-attr]
                producer = None if value is None else value.producer()
                if producer is not None and producer.op_type == "DequantizeNBits":
                    found.update(_shardable_blocks(producer))
                is_float = value is not None and value.dtype in TRAINABLE_TYPES
                if value is not None and value.is_initializer() and is_float and len(value.shape or ()) > 1:
                    found.add(value)
        return found - trained


def _shardable_blocks(node: ir.Node) -> list[ir.Value]:
    """Packed numbers, scales and zero points whose blocks are in rows and in order."""
    stored = [value for value in node.inputs if value is not None]
    is_in_order = len(node.inputs) < 4 or node.inputs[3] is None
    return stored if is_in_order and all(v.is_initializer() and len(v.shape or ()) > 1 for v in stored) else []


def _nested_nodes(node: ir.Node) -> Iterator[ir.Node]:
    for attribute in node.attributes.values():
        if not attribute.is_ref() and attribute.type is ir.AttributeType.GRAPH:
            yield from ir.traversal.RecursiveGraphIterator(attribute.as_graph())


@dataclass(kw_only=True)
class Region:
    """What is cut together.

    Attributes:
        seed: the value it was grown from.
        cuts: values and own initializers.
        slices: (node, input) that reads a part of a value which others read in full, or of which several ranks hold
            the same shard.
        assignments: every node that computes on shards.
        finer: other blocks for the seed's axis, found on the way.
    """

    seed: ir.Value
    cuts: dict[ir.Value, Sharding] = field(default_factory=dict)
    slices: dict[tuple[ir.Node, int], Sharding] = field(default_factory=dict)
    assignments: dict[ir.Node, Assignment] = field(default_factory=dict)
    finer: list[Sizes] = field(default_factory=list)

    def weights(self, names: Collection[str]) -> list[ir.Value]:
        """The cut values that are initializers of these names."""
        return [value for value in self.cuts if value.is_initializer() and value.name in names]

    @property
    def uneven(self) -> bool:
        """Whether parts may differ by one element: where operators of our own take them, as with a vocabulary."""
        return any(
            isinstance(edit, Replace) and edit.op_type.startswith("Sharded")
            for assignment in self.assignments.values()
            for edit in assignment.edits
        )

    def counts(self) -> dict[str, int]:
        """What the number of ranks must divide: what it is -> how many there are."""
        found: dict[str, int] = {}
        for assignment in self.assignments.values():
            for count, what in assignment.counts:
                found[what] = math.gcd(found.get(what, 0), count)
        if not self.uneven:
            for value, cut in self.cuts.items():
                what = f"axis {cut.axis} of {value.name!r}"
                for block in unlimited(cut):
                    found[what] = math.gcd(found.get(what, 0), block)
        return found


def grow(partitioning: PartitioningContext, seed: ir.Value, axis: int) -> Region:
    """The region that a cut of one axis brings with it, with the coarsest blocks that every node can take.

    Raises:
        CannotShardError: for every choice of blocks some node cannot compute on its part; the first reason is given.
    """
    size = partitioning.facts.shapes[str(seed.name)][axis]
    waiting = deque([Sharding(axis, (size,))])
    tried: set[Sharding] = set()
    first: CannotShardError | None = None
    while waiting and len(tried) < _MOST_TRIES:
        cut = waiting.popleft()
        if cut in tried or sum(cut.blocks) != size:
            continue
        tried.add(cut)
        region = Region(seed=seed)
        try:
            _Spreading(partitioning, region).run(seed, cut)
        except CannotShardError as error:
            first = first or error
            if error.hint is not None:
                waiting.appendleft(Sharding(axis, error.hint))
            waiting.extend(Sharding(axis, blocks) for blocks in region.finer)
            least = min(cut.blocks)
            if partitioning.facts.replicating_ranks and not cut.parts and least < max(cut.blocks):
                # One head of keys and values for all queries, in one matmul with them.
                waiting.append(Sharding(axis, cut.blocks, tuple(int(block == least) for block in cut.blocks)))
            continue
        return region
    assert first is not None
    raise first


class _Spreading:
    """Carries cuts from node to node until nothing new follows."""

    def __init__(self, partitioning: PartitioningContext, region: Region) -> None:
        self.partitioning, self.region = partitioning, region
        self.waiting: deque[ir.Node] = deque()
        # Nodes that compute on heads of which ranks hold the same: once it is known what they do not read.
        self.late: deque[ir.Node] = deque()

    def cut_value(self, value: ir.Value, wanted: Sharding) -> None:
        """Notes how a value is cut, which may turn out to be in fewer parts than first thought."""
        known = self.region.cuts.get(value)
        if known is not None:
            if (known.axis, known.blocks) != (wanted.axis, wanted.blocks) or not wanted.has_limits_of(known):
                raise CannotShardError(f"{value.name!r} would have to be sharded in two ways")
            if known == wanted:
                return
        self.region.cuts[value] = wanted
        producer = value.producer()
        if producer is not None:
            self.waiting.append(producer)
        for user, _ in value.uses():
            if user not in self.partitioning.order:
                raise CannotShardError(f"{value.name!r} is read inside of a nested graph, by {label(user)}")
            self.waiting.append(user)

    def run(self, seed: ir.Value, cut: Sharding) -> None:
        """Grows the region from one value.

        Raises:
            CannotShardError: a node cannot compute on what is cut.
        """
        self.cut_value(seed, cut)
        while self.waiting or self.late:
            is_late = not self.waiting
            node = (self.waiting or self.late).popleft()
            inputs, outputs = self._known(node)
            if not is_late and any(one.parts for one in (*inputs.values(), *outputs.values())):
                self.late.append(node)
            else:
                self._visit(node, apply_rule(self.partitioning.context(node), inputs, outputs))
        for node, index in self.region.slices:
            value = node.inputs[index]
            if value is not None and value not in self.region.cuts and _follows_cut(self.region, value):
                raise CannotShardError(
                    f"{value.name!r}, which {label(node)} reads, is computed from what would be sharded"
                )

    def _known(self, node: ir.Node) -> tuple[dict[int, Sharding], dict[int, Sharding]]:
        cuts, slices = self.region.cuts, self.region.slices
        inputs = {i: slices[node, i] for i in range(len(node.inputs)) if (node, i) in slices}
        inputs |= {i: cuts[v] for i, v in enumerate(node.inputs) if v is not None and v in cuts}
        return inputs, {o: cuts[v] for o, v in enumerate(node.outputs) if v in cuts}

    def _visit(self, node: ir.Node, assignment: Assignment) -> None:
        region = self.region
        before = region.assignments.get(node)
        region.assignments[node] = assignment
        region.finer.extend(blocks for _, blocks in assignment.finer)
        narrowed = _narrow(region, node, assignment)
        if before is not None and (before.inputs, before.outputs) == (assignment.inputs, assignment.outputs):
            return
        for index, wanted in assignment.inputs.items():
            value = node.inputs[index]
            assert value is not None
            if (node, index) in narrowed:
                continue
            if self.partitioning.is_free(value) and not _follows_cut(region, value) and value not in region.cuts:
                region.slices[node, index] = wanted
            else:
                self.cut_value(value, wanted)
        for index, wanted in assignment.outputs.items():
            if node.outputs[index].name:
                self.cut_value(node.outputs[index], wanted)


def _narrow(region: Region, node: ir.Node, assignment: Assignment) -> set[tuple[ir.Node, int]]:
    """The inputs of which a node reads a rank's shard where several ranks hold the same larger one; they are noted."""
    found = set()
    for index, wanted in assignment.inputs.items():
        value = node.inputs[index]
        held = None if value is None else region.cuts.get(value)
        if held is not None and wanted != held and (held.is_replicated or not wanted.has_limits_of(held)):
            region.slices[node, index] = wanted
            found.add((node, index))
        elif held is not None:
            region.slices.pop((node, index), None)
    return found


def _follows_cut(region: Region, value: ir.Value) -> bool:
    """Whether a value is computed from the elements of cut ones: a mask of NaNs, an index of the largest."""
    stack, seen = [value], set[ir.Value]()
    while stack:
        last = stack.pop()
        node = last.producer()
        if last in region.cuts:
            return True
        # What a node of the region gives out uncut is added up or gathered; a shape has no elements of the value.
        if last in seen or node is None or node in region.assignments or node.op_type in ("Shape", "Size"):
            continue
        seen.add(last)
        stack.extend(source for source in node.inputs if source is not None)
    return False


def find_seeds(partitioning: PartitioningContext) -> Iterator[tuple[ir.Value, int]]:
    """Axes where a cut may begin: outputs of matmuls with weights, rows of tables of weights; in order of nodes."""
    for node in partitioning.nodes:
        if node.domain not in ("", FUSED):
            continue
        if node.op_type == "Gather":
            table = node.inputs[0]
            if table in partitioning.own and table is not None and len(table.shape or ()) >= 2:
                yield table, 0
            continue
        if node.op_type == "Experts":  # the hidden features of the first
            first, axis = node.inputs[3], -2 if node.attributes["rows_are_outputs"].value else -1
            if first is not None and first in partitioning.from_weights:
                yield first, axis % len(partitioning.facts.shapes[str(first.name)])
        for index in MATMUL_OPERATORS.get(node.op_type, ()):
            value = node.inputs[index] if index < len(node.inputs) else None
            if value is None or value not in partitioning.from_weights:
                continue
            if str(value.name) in partitioning.facts.from_inputs:
                continue
            yield from ((node.outputs[0], axis) for axis in _output_axes(partitioning, node, index))


def _output_axes(partitioning: PartitioningContext, node: ir.Node, index: int) -> list[int]:
    """Axes of a product that come from its weight alone."""
    shape = partitioning.facts.shapes.get(str(node.outputs[0].name))
    if shape is None:
        return []
    if node.op_type in ("MatMul", "Linear"):
        return [len(shape) - 1] if index == 1 else []
    if node.op_type == "Gemm":
        return [1] if index == 1 else []
    if node.op_type == "Einsum":
        equation = str(node.attributes["equation"].value).replace(" ", "")
        if "->" not in equation or "." in equation:
            return []
        left, right = equation.split("->")
        terms = left.split(",")
        others = "".join(term for place, term in enumerate(terms) if place != index)
        return [right.index(letter) for letter in terms[index] if letter in right and letter not in others]
    return [1]
