"""Editing a graph for one context rank: parts, gathered values, sums over the ranks, and the rank's sizes.

Every operator that is put in knows how its operand is cut, and has the gradient of what it computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from onward.graph.nodes.node_writer import free_name, make_attribute, value_names
from onward.plan.context.convolutions import Halo, set_pads
from onward.plan.context.ranges import TokenAxis, TokenCut, axis_of
from onward.plan.context.rules import CutNode
from onward.plan.horizontal.cuts import DOMAIN, SetEntry, Sizes, WeighMean
from onward.plan.horizontal.regions import PartitioningContext


class ContextEditor:
    """A graph in the making.

    Attributes:
        partitioning: the graph with what is known of its values; what is put in is added to that.
        ranks: how many share a sequence.
        samples: of the batch that the graph's sizes are known for; see `plan_context`.
        cuts: values of which a rank has a part.
        full: part or cut value -> the full one, where there is one.
    """

    def __init__(self, partitioning: PartitioningContext, ranks: int, samples: int = 0) -> None:
        self.partitioning, self.ranks, self.samples = partitioning, ranks, samples
        self.graph = partitioning.main
        self.shapes: dict[str, Sizes] = partitioning.facts.shapes  # type: ignore[assignment]
        self.numbers: dict[str, Any] = partitioning.facts.numbers  # type: ignore[assignment]
        self.cuts: dict[ir.Value, TokenCut] = {}
        self.full: dict[ir.Value, ir.Value] = {}
        self._parts: dict[tuple[ir.Value, TokenCut], ir.Value] = {}
        self._taken = value_names(self.graph)

    def become(self, node: ir.Node, op_type: str, attributes: Mapping[str, Any]) -> None:
        """Another operator of `DOMAIN` in place of a node's own, which keeps its attributes."""
        node.domain, node.op_type, node.version = DOMAIN, op_type, 1
        for name, value in attributes.items():
            node.attributes[name] = make_attribute(name, value)

    def set_cut(self, value: ir.Value, cut: TokenCut) -> None:
        """Notes that a rank has its part of a value."""
        self.cuts[value] = cut
        if value.shape is not None:
            sizes: list[Any] = list(value.shape)
            axis = self._axis(cut)
            is_known = axis.samples == "none" and (isinstance(sizes[cut.axis], int) or len(cut.blocks) == 1)
            sizes[cut.axis] = axis.local_length(0, self.ranks) if is_known else ir.SymbolicDim(None)
            value.shape = ir.Shape(sizes)

    def set_entry(self, node: ir.Node, edit: SetEntry) -> None:
        """One number of a vector of sizes becomes the rank's; of a cut value's shape, the full one."""
        assert isinstance(edit.target, int)
        assert isinstance(edit.cut, TokenCut)
        numbers: dict[str, Any] = {**self._of(edit.cut), "position": edit.position}
        del numbers["cut_axis"]
        if edit.target >= 0:
            value = node.inputs[edit.target]
            assert value is not None
            if node.op_type == "Slice":
                numbers["is_end"] = 1
            sizes = self._node("LocalSizes", [value], f"{value.name}/local", numbers, before=node)
            self._same_facts(sizes, value)
            node.replace_input_with(edit.target, sizes)
            return
        value = node.outputs[0]
        uses = list(value.uses())
        whole = self._node("FullSizes", [value], f"{value.name}/full", numbers, after=node)
        self._same_facts(whole, value)
        for user, index in uses:
            user.replace_input_with(index, whole)

    def add_up(self, node: ir.Node, found: CutNode) -> None:
        """Partial sums, or means of a rank's own elements: those of all ranks, under the name of the value."""
        value = node.outputs[0]
        uses, name = list(value.uses()), str(value.name)
        self._rename(value, f"{name}/partial")
        inputs: list[ir.Value | None] = [value]
        attributes: dict[str, Any] = {"ranks": self.ranks}
        weighed = next((edit for edit in found.assignment.edits if isinstance(edit, WeighMean)), None)
        if weighed is not None:
            assert isinstance(weighed.cut, TokenCut)
            attributes["mean_blocks"] = weighed.cut.tokens
        op_type = "ContextSum"
        if found.mean is not None:
            op_type = "ContextMeanLoss"
            inputs += [node.inputs[i] if i < len(node.inputs) else None for i in found.mean]
            if "ignore_index" in node.attributes:
                attributes["ignore_index"] = node.attributes["ignore_index"].as_int()
        total = self._node(op_type, inputs, name, attributes, after=node)
        total.type, total.shape = value.type, value.shape
        for user, index in uses:
            user.replace_input_with(index, total)
        self._replace_output(value, total)

    def read_neighbours(self, node: ir.Node, cut: TokenCut, halo: Halo) -> None:
        """A convolution over a rank's tokens and those next to them; its result keeps the name, without the excess."""
        value, result = node.inputs[0], node.outputs[0]
        assert value is not None
        numbers = {**self._of(cut), "before": halo.before, "after": halo.after}
        wide = self._node("ContextHalo", [value], f"{value.name}/halo", numbers, before=node)
        self._same_facts(wide, value)
        node.replace_input_with(0, wide)
        set_pads(node, halo.pads)
        uses, name = list(result.uses()), str(result.name)
        self._rename(result, f"{name}/halo")
        own = self._node(
            "ContextTrim", [result], name, {**self._of(cut), "excess": halo.before + halo.after}, after=node
        )
        self._same_facts(result, own)
        for made, like in ((wide, value), (own, result)):
            made.type, made.shape = like.type, like.shape
        for one in (result, own):
            self.set_cut(one, cut)
        for one in (wide, result):  # of ranks with shorter chunks, and with less of them at the ends, others
            if one.shape is not None:
                sizes: list[Any] = list(one.shape)
                sizes[cut.axis] = ir.SymbolicDim(None)
                one.shape = ir.Shape(sizes)
        for user, index in uses:
            user.replace_input_with(index, own)
        self._replace_output(result, own)

    def gather(self, node: ir.Node, index: int) -> None:
        """Lets a node read the full value instead of a rank's part."""
        value = node.inputs[index]
        assert value is not None
        node.replace_input_with(index, self.gathered(value, node))

    def gathered(self, value: ir.Value, before: ir.Node) -> ir.Value:
        """The full value; one for all that read it."""
        if value not in self.full:
            full = self._node("ContextGather", [value], f"{value.name}/all", self._of(self.cuts[value]), before=before)
            self._same_facts(full, value)
            self._full_shape(full, value)
            self.full[value] = full
        return self.full[value]

    def part(self, value: ir.Value, cut: TokenCut, before: ir.Node) -> ir.Value:
        """A rank's part of a full value; one for all that read it."""
        key = value, cut
        if key not in self._parts:
            part = self._node("ContextPart", [value], f"{value.name}/own", self._of(cut), before=before)
            part.type, part.shape = value.type, value.shape
            self._same_facts(part, value)
            self.set_cut(part, cut)
            self.full[part], self._parts[key] = value, part
        return self._parts[key]

    def share_among(self, value: ir.Value, cut: TokenCut) -> None:
        """Everything that reads a value reads a rank's part of it."""
        node, uses = value.producer(), list(value.uses())
        following = next((one for one in self.partitioning.nodes if any(user is one for user, _ in uses)), None)
        if node is None or following is None:
            return
        axis = axis_of(cut, self.samples)
        if axis is None or any(axis.local_length(rank, self.ranks) == 0 for rank in range(self.ranks)):
            return
        part = self.part(value, cut, following)
        for user, index in uses:
            user.replace_input_with(index, part)

    def give_out(self, value: ir.Value) -> None:
        """An output of the graph is full, under its name."""
        name, cut = str(value.name), self.cuts[value]
        self._rename(value, f"{name}/part")
        full = self._node("ContextGather", [value], name, self._of(cut), after=value.producer())
        self._full_shape(full, value)
        self._replace_output(value, full)

    def _full_shape(self, full: ir.Value, part: ir.Value) -> None:
        full.type = part.type
        if part.shape is not None:
            cut = self.cuts[part]
            sizes: list[Any] = list(part.shape)
            sizes[cut.axis] = sum(cut.blocks) if isinstance(sizes[cut.axis], int) else sizes[cut.axis]
            full.shape = ir.Shape(sizes)

    def _replace_output(self, value: ir.Value, other: ir.Value) -> None:
        for place, output in enumerate(self.graph.outputs):
            if output is value:
                self.graph.outputs[place] = other

    def _same_facts(self, value: ir.Value, like: ir.Value) -> None:
        for facts in (self.shapes, self.numbers):
            if str(like.name) in facts:
                facts[str(value.name)] = facts[str(like.name)]
        if str(like.name) in self.partitioning.facts.from_inputs:
            names = self.partitioning.facts.from_inputs | {str(value.name)}
            self.partitioning.facts = replace(self.partitioning.facts, from_inputs=names)

    def _axis(self, cut: TokenCut) -> TokenAxis:
        found = axis_of(cut, self.samples)
        assert found is not None
        return found

    def _of(self, cut: TokenCut) -> dict[str, Any]:
        axis = self._axis(cut)
        found = {"cut_axis": cut.axis, "blocks": axis.blocks, "ranks": self.ranks}
        if axis != TokenAxis(axis.blocks):
            found |= {"rows": axis.rows, "samples": axis.samples}
        return found

    def _rename(self, value: ir.Value, name: str) -> None:
        former = str(value.name)
        self._taken.discard(former)
        value.name = free_name(name, self._taken)
        if former in self.shapes:
            self.shapes[value.name] = self.shapes[former]

    def _node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        attributes: Mapping[str, Any],
        *,
        before: ir.Node | None = None,
        after: ir.Node | None = None,
    ) -> ir.Value:
        result = ir.Value(name=free_name(name, self._taken))
        written = [make_attribute(key, value) for key, value in attributes.items()]
        node = ir.Node(DOMAIN, op_type, inputs, written, outputs=[result], name=result.name)
        result.type = inputs[0].type if inputs[0] is not None else None
        if before is not None:
            self.graph.insert_before(before, node)
        elif after is not None:
            self.graph.insert_after(after, node)
        return result
