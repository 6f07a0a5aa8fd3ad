"""The words of the proof that a cut is sound: where a value is cut, what a node makes of it, and how it is edited.

A cut is a `Sharding`, of values as well as of weights: an axis, and the blocks that all ranks share.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from onward.graph.nodes.structure import label
from onward.plan.shards import Sharding

Sizes = tuple[int, ...]

DOMAIN = "onward.parallel"
"""Of the collective operators that a rank's graph has in addition to the user's own."""


class CannotShardError(Exception):
    """A node cannot compute on what is cut; `hint` says which blocks of the same axis it could take."""

    def __init__(self, reason: str, hint: Sizes | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


@dataclass(frozen=True)
class SetEntry:
    """One number of a vector of sizes or bounds becomes the rank's: `cut.local_size`; without a cut -1.

    `target` is the index of the input that holds the vector, or the name of the attribute; -1: the node's own result,
    which is a shape and becomes that of the full value.
    """

    target: int | str
    position: int
    cut: Sharding | None
    length: int


@dataclass(frozen=True)
class SetAttribute:
    """An attribute that counts heads or groups becomes the rank's number: `cut.local_size`."""

    name: str
    cut: Sharding


@dataclass(frozen=True)
class Replace:
    """The node becomes an operator of `DOMAIN` that knows how its operand is cut."""

    op_type: str
    cut: Sharding


@dataclass(frozen=True)
class AddBiasAfterReduce:
    """The node's bias (an input) is added after its partial sums were added up: along `axis` of its result."""

    input: int
    axis: int


@dataclass(frozen=True)
class WeighMean:
    """The node's result is a mean over a rank's part of `cut`: it is multiplied by the rank's share before the sum."""

    cut: Sharding


@dataclass(frozen=True)
class TakeInputs:
    """The node continues with these of its inputs, in this order, and without these attributes."""

    inputs: tuple[int, ...]
    without: tuple[str, ...]


Edit = TakeInputs | SetEntry | SetAttribute | Replace | AddBiasAfterReduce | WeighMean


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What a node computes on: which operands are cut and how; everything else is unsharded.

    Attributes:
        inputs, outputs: index -> cut.
        partial: the results are partial sums, to be added up over the ranks.
        counts: units (heads, groups, channels) that the number of ranks must divide, each with its name.
        gathers: the node itself reduces over the ranks and gives full results.
        edits: how the node is written for one rank.
        finer: blocks of an input's axis that the node could take as well, to be tried if these fail.
    """

    inputs: Mapping[int, Sharding] = field(default_factory=dict)
    outputs: Mapping[int, Sharding] = field(default_factory=dict)
    partial: bool = False
    counts: tuple[tuple[int, str], ...] = ()
    gathers: bool = False
    edits: tuple[Edit, ...] = ()
    finer: tuple[tuple[int, Sizes], ...] = ()


@dataclass(frozen=True)
class Link:
    """Axes of a node's operands that are one and the same dimension, and may be cut together.

    `partial`: the dimension is summed over. `bias`: input that must not be summed as often as there are ranks, and the
    axis of the result that it belongs to.
    """

    inputs: Mapping[int, int]
    outputs: Mapping[int, int]
    partial: bool = False
    bias: tuple[int, int] | None = None


class NodeContext:
    """A node in its graph, with the facts that rules ask for."""

    def __init__(self, node: ir.Node, version: int, facts: Facts) -> None:
        self.node = node
        self.version = version
        self.facts = facts

    @property
    def name(self) -> str:
        """`node 'name' (Operator)`."""
        return label(self.node)

    def has_input(self, index: int) -> bool:
        """Whether an input is given."""
        return index < len(self.node.inputs) and self.node.inputs[index] is not None

    def shape(self, index: int) -> Sizes:
        """The sizes of an input."""
        value = self.node.inputs[index] if index < len(self.node.inputs) else None
        return self._shape(value, f"input {index}")

    def result(self, index: int = 0) -> Sizes:
        """The sizes of an output."""
        return self._shape(self.node.outputs[index], f"output {index}")

    def _shape(self, value: ir.Value | None, what: str) -> Sizes:
        found = None if value is None else self.facts.shapes.get(str(value.name))
        if found is None:
            raise CannotShardError(f"{self.name}: the shape of its {what} depends on data")
        return found

    def outputs(self) -> list[int]:
        """Outputs that have a name, and so may be read."""
        return [index for index, value in enumerate(self.node.outputs) if value.name]

    def numbers(self, index: int) -> tuple[Any, ...] | None:
        """The numbers of an input that is a vector of sizes, as far as they are known; a scalar counts as one."""
        value = self.node.inputs[index] if index < len(self.node.inputs) else None
        found = None if value is None else self.facts.numbers.get(str(value.name))
        if found is None:
            return None
        return tuple(found) if isinstance(found, tuple) else (found,)

    def attribute(self, name: str, default: Any = None) -> Any:
        """The value of an attribute."""
        found = self.node.attributes.get(name)
        return default if found is None else found.value

    def axis(self, name: str, default: int, rank: int) -> int:
        """An attribute that is an axis, counted from the front."""
        return int(self.attribute(name, default)) % rank


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of the values of a graph, by name.

    Attributes:
        shapes: sizes.
        numbers: shape arithmetic.
        from_inputs: values that depend on the graph's inputs.
        norms_over_ranks: whether an axis that is normalized or averaged may be cut, for a collective of one or two
            numbers a row.
        replicating_ranks: how many ranks share heads that are fewer, so that several hold the same; 0: none may.
    """

    shapes: Mapping[str, Sizes]
    numbers: Mapping[str, Any]
    from_inputs: frozenset[str]
    norms_over_ranks: bool = False
    replicating_ranks: int = 0

    def heads(self, axis: int, size: int, heads: int) -> Sharding:
        """An axis of heads in one block, which are replicated where there are fewer than ranks."""
        return Sharding(axis, (size,), (self.parts(heads),))

    def parts(self, count: int) -> int:
        """Into how many parts so many heads are divided at most, where that is fewer than ranks; else 0."""
        ranks = self.replicating_ranks
        return count if ranks and count < ranks and ranks % count == 0 else 0


Known = Mapping[int, Sharding]


def follow(
    links: Iterable[Link], context: NodeContext, inputs: Known, outputs: Known, what: str = "cut axis"
) -> Assignment:
    """What the one link says that has all the known cuts.

    Raises:
        CannotShardError: no link has them, or their blocks differ.
    """
    blocks = {cut.blocks for cut in (*inputs.values(), *outputs.values())}
    for link in links:
        fits = all(link.inputs.get(i) == cut.axis for i, cut in inputs.items())
        if fits and all(link.outputs.get(o) == cut.axis for o, cut in outputs.items()):
            if len(blocks) > 1:
                raise CannotShardError(f"{context.name}: its operands are sharded into different blocks")
            (own,) = blocks
            parts = _common_parts(context, link, inputs, outputs)
            edits = (
                (AddBiasAfterReduce(*link.bias),) if link.bias is not None and context.has_input(link.bias[0]) else ()
            )
            return Assignment(
                inputs={i: Sharding(axis, own, parts) for i, axis in link.inputs.items()},
                outputs={o: Sharding(axis, own, parts) for o, axis in link.outputs.items()},
                partial=link.partial,
                edits=edits,
            )
    axes = ", ".join(
        [f"axis {cut.axis} of input {i}" for i, cut in inputs.items()]
        + [f"axis {cut.axis} of output {o}" for o, cut in outputs.items()]
    )
    raise CannotShardError(f"{context.name} needs all of its {what} at once ({axes})")


def _common_parts(context: NodeContext, link: Link, inputs: Known, outputs: Known) -> Sizes:
    """What a node computes of heads that several ranks hold: the same on each, or its share of them with others'.

    Raises:
        CannotShardError: the ranks that hold the same would add up the same.
    """
    if not any(cut.parts for cut in (*inputs.values(), *outputs.values())):
        return ()
    values = context.node.inputs
    computed = {i: cut for i, cut in inputs.items() if (v := values[i]) is None or not v.is_initializer()} or inputs
    given = [cut.limits for cut in outputs.values()]
    if all(cut.parts for cut in computed.values()):
        given += [cut.limits for cut in inputs.values()]
    parts = tuple(max(limits) for limits in zip(*given, strict=True))
    if any(parts) and link.partial:
        raise CannotShardError(f"{context.name} sums over heads that are fewer than the ranks")
    return parts


def broadcast_links(context: NodeContext, operands: Sequence[int], first_axis: int = 0) -> list[Link]:
    """One link for each axis of a result to whose shape the operands broadcast."""
    result = context.result()
    links = []
    for axis in range(first_axis, len(result)):
        if result[axis] == 1:
            continue
        inputs = {}
        for index in operands:
            if not context.has_input(index):
                continue
            shape = context.shape(index)
            own = axis - (len(result) - len(shape))
            if own >= 0 and shape[own] == result[axis]:
                inputs[index] = own
        links.append(Link(inputs, dict.fromkeys(context.outputs(), axis)))
    return links


def units(blocks: Sizes, unit: int) -> int | None:
    """How many units of a size every rank's shards must be made of: the greatest common divisor of blocks in units."""
    if any(block % unit for block in blocks):
        return None
    return math.gcd(*(block // unit for block in blocks))


def split_at(blocks: Sizes, borders: Iterable[int]) -> Sizes:
    """Blocks cut further at these places of the axis."""
    ends = []
    end = 0
    for block in blocks:
        end += block
        ends.append(end)
    places = sorted({0, *ends, *borders})
    return tuple(after - before for before, after in itertools.pairwise(places))


def within(cut: Sharding, start: int, end: int) -> Sharding | None:
    """The blocks that make up a range of the axis; None if one is across its border."""
    found, place = [], 0
    for block, limit in zip(cut.blocks, cut.limits, strict=True):
        if place >= start and place + block <= end:
            found.append((block, limit))
        elif place < end and place + block > start:
            return None
        place += block
    return Sharding(cut.axis, tuple(block for block, _ in found), tuple(limit for _, limit in found))


def joined(axis: int, cuts: Iterable[Sharding]) -> Sharding:
    """The blocks of several tensors that are concatenated along their cut axes."""
    listed = list(cuts)
    return Sharding(
        axis, tuple(b for cut in listed for b in cut.blocks), tuple(p for cut in listed for p in cut.limits)
    )


def unlimited(*cuts: Sharding) -> list[int]:
    """The blocks that every rank has a shard of its own of."""
    return [block for cut in cuts for block, limit in zip(cut.blocks, cut.limits, strict=True) if not limit]
