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

import onward.plan.horizontal.rules_elementwise
import onward.plan.horizontal.rules_fused
import onward.plan.horizontal.rules_linear
import onward.plan.horizontal.rules_movement  # noqa: F401  (importing registers the rules)
from onward.graph.fusion.rewriting import DOMAIN as FUSED
from onward.graph.nodes.structure import label
from onward.graph.training_graph import TrainingGraph
from onward.graph.weights.gradients import TRAINABLE_TYPES, is_without_gradient
from onward.plan.horizontal.cuts import Assignment, CannotShardError, Facts, NodeContext, Replace, Sizes
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
        self.facts = Facts(shapes, numbers or {}, frozenset(str(value.name) for value in from_inputs))
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
                is_float = value is not None and value.dtype in TRAINABLE_TYPES
                if value is not None and value.is_initializer() and is_float and len(value.shape or ()) > 1:
                    found.add(value)
        return found - trained


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
        slices: (node, input) that reads a part of a value which others read in full.
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
                for block in cut.blocks:
                    found[what] = math.gcd(found.get(what, 0), block)
        return found


def grow(partitioning: PartitioningContext, seed: ir.Value, axis: int) -> Region:
    """The region that a cut of one axis brings with it, with the coarsest blocks that every node can take.

    Raises:
        CannotShardError: for every choice of blocks some node cannot compute on its part; the first reason is given.
    """
    size = partitioning.facts.shapes[str(seed.name)][axis]
    waiting: deque[Sizes] = deque([(size,)])
    tried: set[Sizes] = set()
    first: CannotShardError | None = None
    while waiting and len(tried) < _MOST_TRIES:
        blocks = waiting.popleft()
        if blocks in tried or sum(blocks) != size:
            continue
        tried.add(blocks)
        region = Region(seed=seed)
        try:
            _spread(partitioning, region, seed, Sharding(axis, blocks))
        except CannotShardError as error:
            first = first or error
            if error.hint is not None:
                waiting.appendleft(error.hint)
            waiting.extend(region.finer)
            continue
        return region
    assert first is not None
    raise first


def _spread(partitioning: PartitioningContext, region: Region, seed: ir.Value, cut: Sharding) -> None:
    waiting: deque[ir.Node] = deque()

    def cut_value(value: ir.Value, wanted: Sharding) -> None:
        known = region.cuts.get(value)
        if known is not None:
            if known != wanted:
                raise CannotShardError(f"{value.name!r} would have to be sharded in two ways")
            return
        region.cuts[value] = wanted
        producer = value.producer()
        if producer is not None:
            waiting.append(producer)
        for user, _ in value.uses():
            if user not in partitioning.order:
                raise CannotShardError(f"{value.name!r} is read inside of a nested graph, by {label(user)}")
            waiting.append(user)

    cut_value(seed, cut)
    while waiting:
        node = waiting.popleft()
        context = partitioning.context(node)
        inputs = {i: region.cuts[v] for i, v in enumerate(node.inputs) if v is not None and v in region.cuts}
        inputs |= {i: region.slices[node, i] for i in range(len(node.inputs)) if (node, i) in region.slices}
        outputs = {o: region.cuts[v] for o, v in enumerate(node.outputs) if v in region.cuts}
        assignment = apply_rule(context, inputs, outputs)
        before = region.assignments.get(node)
        region.assignments[node] = assignment
        region.finer.extend(blocks for _, blocks in assignment.finer)
        if before is not None and (before.inputs, before.outputs) == (assignment.inputs, assignment.outputs):
            continue
        for index, wanted in assignment.inputs.items():
            value = node.inputs[index]
            assert value is not None
            is_whole = partitioning.is_free(value) and not _follows_cut(region, value)
            if is_whole and value not in region.cuts:
                region.slices[node, index] = wanted
            else:
                cut_value(value, wanted)
        for index, wanted in assignment.outputs.items():
            if node.outputs[index].name:
                cut_value(node.outputs[index], wanted)
    for node, index in region.slices:
        value = node.inputs[index]
        if value is not None and _follows_cut(region, value):
            raise CannotShardError(f"{value.name!r}, which {label(node)} reads, is computed from what would be sharded")


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
