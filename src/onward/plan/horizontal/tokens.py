"""Sequence parallelism: what is between the cut layers is shared by tokens (Korthikanti et al., 2022, section 4.2.2).

Where partial sums are added up, each rank takes the sums of its own tokens, and keeps to them through norms, dropout
and residuals, until a cut layer reads all tokens again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from onward.plan.horizontal.cuts import Assignment, CannotShardError, Edit, Replace, SetEntry
from onward.plan.horizontal.regions import PartitioningContext, Region
from onward.plan.horizontal.rules import apply_rule
from onward.plan.shards import Sharding

ANY_LENGTH: tuple[int, ...] = ()
"""The blocks of a token axis in a plan: one, as long as the batch at hand has it."""


@dataclass(kw_only=True)
class TokenRegion:
    """All values that are shared by tokens.

    Attributes:
        axes: value -> axis of its tokens.
        assignments: every node that computes on a rank's tokens.
        slices: (node, input) that reads a rank's tokens of a value without a gradient.
        gathers: (node, input) outside that reads all tokens.
        scatters: (node, input) that reads a rank's tokens of a value computed in full -> their axis.
    """

    axes: dict[ir.Value, int] = field(default_factory=dict)
    assignments: dict[ir.Node, Assignment] = field(default_factory=dict)
    slices: dict[tuple[ir.Node, int], Sharding] = field(default_factory=dict)
    gathers: list[tuple[ir.Node, int]] = field(default_factory=list)
    scatters: dict[tuple[ir.Node, int], int] = field(default_factory=dict)


def share_tokens(partitioning: PartitioningContext, regions: Sequence[Region], size: int) -> TokenRegion:
    """Follows sums [batch, tokens, features] from the end of one region forward to the next.

    Sums of another rank, and such whose number of tokens `size` does not divide, stay unsharded.
    """
    found = TokenRegion()
    cut_nodes = {node: a for region in regions for node, a in region.assignments.items()}
    own = _Follower(partitioning, found)
    for node in partitioning.nodes:
        assignment = cut_nodes.get(node)
        if assignment is None:
            own.visit(node)
            continue
        if assignment.partial:
            shape = partitioning.facts.shapes.get(str(node.outputs[0].name), ())
            if len(shape) == 3 and shape[1] % size == 0 and shape[1] > 1:
                found.axes[node.outputs[0]] = 1
        for index, value in enumerate(node.inputs):
            if value is not None and value in found.axes and not partitioning.needs_gradient(node, index):
                found.gathers.append((node, index))
    return found


class _Follower:
    """Visits the nodes between regions, in order."""

    def __init__(self, partitioning: PartitioningContext, found: TokenRegion) -> None:
        self.partitioning = partitioning
        self.found = found

    def visit(self, node: ir.Node) -> None:
        """Lets a node compute on a rank's tokens if it can, or gathers them before it."""
        axes = self.found.axes
        known = {i: value for i, value in enumerate(node.inputs) if value is not None and value in axes}
        if not known:
            return
        try:
            assignment = self._assign(node, {i: self._cut(value) for i, value in known.items()})
        except CannotShardError:
            self.found.gathers.extend((node, index) for index in known)
            return
        self.found.assignments[node] = assignment
        for index, cut in assignment.inputs.items():
            value = node.inputs[index]
            if value is None or value in axes:
                continue
            if self.partitioning.is_free(value):
                self.found.slices[node, index] = Sharding(cut.axis, ANY_LENGTH)
            else:
                self.found.scatters[node, index] = cut.axis
        for index, cut in assignment.outputs.items():
            if node.outputs[index].name:
                axes[node.outputs[index]] = cut.axis

    def _cut(self, value: ir.Value) -> Sharding:
        axis = self.found.axes[value]
        return Sharding(axis, (self.partitioning.facts.shapes[str(value.name)][axis],))

    def _assign(self, node: ir.Node, inputs: dict[int, Sharding]) -> Assignment:
        """The rule's word, as far as it holds for sequences of any length.

        Raises:
            CannotShardError: the node mixes tokens, or is written for one number of them.
        """
        assignment = apply_rule(self.partitioning.context(node), inputs, {})
        if assignment.partial:
            raise CannotShardError("tokens are summed over")
        cuts = (*assignment.inputs.values(), *assignment.outputs.values())
        if any(len(cut.blocks) != 1 for cut in cuts):
            raise CannotShardError("tokens are merged with other axes")
        edits: list[Edit] = []
        for edit in assignment.edits:
            if isinstance(edit, SetEntry) and edit.target == -1 and edit.cut is not None:
                edits.append(replace(edit, cut=Sharding(edit.cut.axis, ANY_LENGTH)))
            elif isinstance(edit, SetEntry) and edit.cut is None:
                edits.append(edit)
            elif isinstance(edit, Replace) and edit.op_type == "Dropout":
                edits.append(replace(edit, cut=Sharding(edit.cut.axis, ANY_LENGTH)))
            else:
                raise CannotShardError("the node is written for a fixed number of tokens")
        return replace(assignment, edits=tuple(edits))
