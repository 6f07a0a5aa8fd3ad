"""The graph that one tensor-parallel rank computes: an ordinary ONNX graph with its parts of the weights and
collectives.

Shape arithmetic keeps the sizes of full values; where a node makes a part by them, its own shard's size is put in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.graph.nodes.node_writer import NodeFactory
from onward.graph.reading.tensor_storage import close_file
from onward.graph.training_graph import TrainingGraph
from onward.plan.horizontal.cuts import (
    DOMAIN,
    AddBiasAfterReduce,
    Edit,
    Replace,
    SetAttribute,
    SetEntry,
    TakeInputs,
    WeighMean,
)
from onward.plan.horizontal.planning import HorizontalPlan
from onward.plan.horizontal.tokens import ANY_LENGTH
from onward.plan.shards import Sharding, take_shard

VERSION = 1
"""Of the operators of `DOMAIN`."""


def localize(graph: TrainingGraph, plan: HorizontalPlan, rank: int, *, gathered: Sequence[str] = ()) -> TrainingGraph:
    """One rank's graph, with the names of the full one; what it computes for a name that is cut is a part.

    Outputs of the graph stay unsharded: the parts of a cut one are gathered, which costs nothing where nobody asks for
    it.

    Args:
        graph: what the plan was made for; it is left as it is, and its weights are read when the rank's are.
        plan: the decision.
        rank: tensor-parallel rank.
        gathered: further cut values that are to be gathered under their own names.

    Raises:
        ValueError: a value of the plan is not in the graph.
    """
    if plan.size == 1:
        return graph
    model = graph.model.clone()
    model.opset_imports[DOMAIN] = VERSION
    _Localizer(model, plan, rank).run(gathered)
    return replace(graph, model=model)


class _Localizer(NodeFactory):
    """Edits one copy of a model; values are found by name, nodes by their first output's."""

    def __init__(self, model: ir.Model, plan: HorizontalPlan, rank: int) -> None:
        super().__init__(model)
        self.plan = plan
        self.rank = rank
        self.values = {str(v.name): v for v in (*model.graph.inputs, *model.graph.initializers.values())}
        self.nodes: dict[str, ir.Node] = {}
        for node in model.graph:
            self.nodes[str(node.outputs[0].name)] = node
            self.values.update({str(v.name): v for v in node.outputs if v.name})
        self.vectors: dict[tuple[str, Any], ir.Value] = {}
        self.inserted: dict[tuple[Any, ...], ir.Value] = {}

    def run(self, gathered: Sequence[str]) -> None:
        unknown = [name for name in (*self.plan.shardings, *self.plan.values) if name not in self.values]
        if unknown:
            raise ValueError(
                f"the plan shards {unknown[0]!r}, which the graph does not have; was it made for another graph?"
            )
        for name, cut in self.plan.shardings.items():
            self._cut_initializer(self.values[name], cut)
        for name, cut in self.plan.values.items():
            self._note_shape(self.values[name], cut)
        for name, axis in self.plan.token_axes.items():
            self._note_shape(self.values[name], Sharding(axis, ANY_LENGTH))
        self._open_regions()
        self._move_tokens()
        self._slice_operands()
        for key, edits in self.plan.edits.items():
            self._edit(self.nodes[key], edits)
        for name in self.plan.reduced:
            self._reduce(self.values[name])
        outputs = [str(value.name) for value in self.graph.outputs]
        for name in dict.fromkeys((*outputs, *gathered)):
            if name in self.plan.values and not self.plan.values[name].is_replicated:
                self._gather(self.values[name], "AllGather", self.plan.values[name])
            elif name in self.plan.token_axes:
                self._gather(self.values[name], "GatherTokens", Sharding(self.plan.token_axes[name], ANY_LENGTH))

    def _cut_initializer(self, value: ir.Value, cut: Sharding) -> None:
        stored = value.const_value
        assert stored is not None
        rank, size = self.rank, self.plan.size
        shape = cut.local_shape([int(n) for n in stored.shape.numpy()], rank, size)

        def read() -> ir.TensorProtocol:
            part = np.array(take_shard(stored.numpy(), cut, rank, size))
            close_file(stored)
            return ir.Tensor(part, dtype=stored.dtype)

        value.const_value = ir.LazyTensor(read, dtype=stored.dtype, shape=ir.Shape(shape), name=value.name)
        value.shape = ir.Shape(shape)

    def _note_shape(self, value: ir.Value, cut: Sharding) -> None:
        if value.shape is not None and not cut.is_replicated:
            sizes = list(value.shape)
            sizes[cut.axis] = self._local(cut) if cut.blocks else ir.SymbolicDim(None)
            value.shape = ir.Shape(sizes)

    def _open_regions(self) -> None:
        """Where full values enter regions: one node a value, whose gradient is added up."""
        for key, index in self.plan.entries:
            axis = self.plan.token_axes.get(self._operand(key, index))
            if axis is None:
                self._replace_operand(key, index, "Enter", "entered")
            else:
                self._replace_operand(key, index, "GatherTokens", "entered", Sharding(axis, ANY_LENGTH), partial=1)

    def _move_tokens(self) -> None:
        """Where shared and full values meet: all tokens are gathered, or a rank's own are taken."""
        for key, index in self.plan.token_gathers:
            axis = self.plan.token_axes[self._operand(key, index)]
            self._replace_operand(key, index, "GatherTokens", "gathered", Sharding(axis, ANY_LENGTH))
        for (key, index), axis in self.plan.token_scatters.items():
            self._replace_operand(key, index, "ScatterTokens", "own", Sharding(axis, ANY_LENGTH))

    def _operand(self, key: str, index: int) -> str:
        value = self.nodes[key].inputs[index]
        assert value is not None
        return str(value.name)

    def _replace_operand(
        self,
        key: str,
        index: int,
        op_type: str,
        suffix: str,
        cut: Sharding | None = None,
        **numbers: int | tuple[int, ...],
    ) -> None:
        """Puts a node before an operand; one for all that read the same value in the same way."""
        node = self.nodes[key]
        value = node.inputs[index]
        assert value is not None
        place = (str(value.name), op_type, cut, tuple(numbers.items()))
        if place not in self.inserted:
            attributes = {} if cut is None else self._of_cut(cut)
            attributes |= {
                name: ir.AttrInt64s(name, number) if isinstance(number, tuple) else ir.AttrInt64(name, number)
                for name, number in numbers.items()
            }
            name = f"{value.name}/{suffix}"
            result = self._node(op_type, [value], name, after=value, like=value, attributes=attributes)
            if cut is not None and op_type in ("LocalPart", "ScatterTokens"):
                self._note_shape(result, cut)
            self.inserted[place] = result
        node.replace_input_with(index, self.inserted[place])

    def _slice_operands(self) -> None:
        """Parts of masks and constants, which others may read in full, and of heads that several ranks hold."""
        for (key, index), cut in self.plan.slices.items():
            held = self.plan.values.get(self._operand(key, index))
            limits = {} if held is None or held.is_replicated else {"held": held.limits}
            self._replace_operand(key, index, "LocalPart", "part", cut, **limits)

    def _edit(self, node: ir.Node, edits: Sequence[Edit]) -> None:
        entries: dict[int | str, list[SetEntry]] = {}
        for edit in edits:
            if isinstance(edit, SetEntry):
                entries.setdefault(edit.target, []).append(edit)
            elif isinstance(edit, SetAttribute):
                node.attributes[edit.name] = ir.AttrInt64(edit.name, self._local(edit.cut))
            elif isinstance(edit, TakeInputs):
                kept = [node.inputs[index] if index < len(node.inputs) else None for index in edit.inputs]
                node.resize_inputs(len(kept))
                for index, value in enumerate(kept):
                    node.replace_input_with(index, value)
                for name in edit.without:
                    node.attributes.pop(name, None)
            elif isinstance(edit, Replace):
                node.domain, node.op_type = DOMAIN, edit.op_type
                node.version = VERSION
                for name, attribute in self._of_cut(edit.cut).items():
                    node.attributes[name] = attribute
        for target, group in entries.items():
            self._set_entries(node, target, group)

    def _local(self, cut: Sharding | None) -> int:
        return -1 if cut is None else cut.local_size(self.rank, self.plan.size)

    def _set_entries(self, node: ir.Node, target: int | str, edits: Sequence[SetEntry]) -> None:
        if isinstance(target, str):
            numbers = list(node.attributes[target].as_ints())
            for edit in edits:
                numbers[edit.position] = self._local(edit.cut)
            node.attributes[target] = ir.AttrInt64s(target, numbers)
        elif target < 0:
            result = node.outputs[0]
            readers = list(result.uses())
            full = self._full_shape(result, edits[0])
            for user, index in readers:
                user.replace_input_with(index, full)
        else:
            value = node.inputs[target]
            assert value is not None
            found = {edit.position: self._local(edit.cut) for edit in edits}
            node.replace_input_with(target, self._with_entries(value, found, edits[0].length))

    def _full_shape(self, shape: ir.Value, edit: SetEntry) -> ir.Value:
        """The shape of a full value from that of a part, whose token axis is a fixed share of any length."""
        assert edit.cut is not None
        if edit.cut.blocks:
            return self._with_entries(shape, {edit.position: sum(edit.cut.blocks)}, edit.length)
        factors = np.ones(edit.length, np.int64)
        factors[edit.position] = self.plan.size
        factor = self.store(factors, "horizontal/shares")
        return self._node("Mul", [shape, factor], f"{shape.name}/whole", after=shape, like=shape, domain="")

    def _with_entries(self, value: ir.Value, found: dict[int, int], length: int) -> ir.Value:
        """A vector of integers with some changed: another constant, or arithmetic on one that is computed."""
        place = (str(value.name), tuple(sorted(found.items())))
        if place in self.vectors:
            return self.vectors[place]
        if value.is_initializer() and value.const_value is not None:
            numbers = value.const_value.numpy().copy().reshape(-1)
            for position, number in found.items():
                numbers[position] = number
            result = self.store(numbers, f"horizontal/{value.name}/part")
        else:
            keep = np.array([position not in found for position in range(length)], np.int64)
            add = np.array([found.get(position, 0) for position in range(length)], np.int64)
            factors, terms = self.store(keep, "horizontal/kept"), self.store(add, "horizontal/sizes")
            kept = self._node("Mul", [value, factors], f"{value.name}/kept", after=value, like=value, domain="")
            result = self._node("Add", [kept, terms], f"{value.name}/sized", after=kept, like=value, domain="")
        self.vectors[place] = result
        return result

    def _reduce(self, value: ir.Value) -> None:
        """Adds up partial sums; the name goes to the sum, and a bias is added after it."""
        node = value.producer()
        assert node is not None
        name = str(value.name)
        readers = list(value.uses())
        self._rename(value, f"{name}/partial")
        biases = [edit for edit in self.plan.edits.get(name, ()) if isinstance(edit, AddBiasAfterReduce)]
        axis = self.plan.token_axes.get(name)
        op_type, attributes = "AllReduce", None
        if axis is not None:
            op_type, attributes = "ReduceScatter", self._of_cut(Sharding(axis, ANY_LENGTH))
        stem = f"{name}/reduced" if biases else name
        partial = self._weighed(value, name)
        result = self._node(op_type, [partial], stem, after=partial, like=value, attributes=attributes)
        for edit in biases:
            result = self._add_bias(node, edit, result, name)
        for user, index in readers:
            user.replace_input_with(index, result)
        self._replace_output(value, result)
        self.values[name] = result

    def _weighed(self, value: ir.Value, name: str) -> ir.Value:
        """A partial sum; of a mean over a rank's part, its share of the full mean."""
        cut = next((edit.cut for edit in self.plan.edits.get(name, ()) if isinstance(edit, WeighMean)), None)
        if cut is None:
            return value
        dtype = np.float32 if value.dtype is None else value.dtype.numpy()
        share = self.store(np.asarray(self._local(cut) / sum(cut.blocks), dtype), "horizontal/share")
        return self._node("Mul", [value, share], f"{name}/weighed", after=value, like=value, domain="")

    def _add_bias(self, node: ir.Node, edit: AddBiasAfterReduce, result: ir.Value, name: str) -> ir.Value:
        """`result + beta * bias`, the bias along `edit.axis` of a result [N, C, ...] or broadcast to one [M, N]."""
        bias = node.inputs[edit.input]
        assert bias is not None
        node.replace_input_with(edit.input, None)
        last = result
        beta = node.attributes.pop("beta", None)
        if beta is not None and beta.as_float() != 1.0:
            dtype = np.float32 if result.dtype is None else result.dtype.numpy()
            factor = self.store(np.asarray(beta.as_float(), dtype), "horizontal/beta")
            last = bias = self._node("Mul", [bias, factor], f"{name}/bias", after=last, like=bias, domain="")
        if node.op_type not in ("Gemm", "Linear"):
            weight = node.inputs[1]
            rank = 0 if weight is None or weight.shape is None else len(weight.shape)
            sizes = self.store(np.array([-1, *[1] * (rank - 2)], np.int64), "horizontal/bias_shape")
            last = bias = self._node("Reshape", [bias, sizes], f"{name}/bias", after=last, like=None, domain="")
            bias.type = result.type
        return self._node("Add", [result, bias], name, after=last, like=result, domain="")

    def _gather(self, value: ir.Value, op_type: str, cut: Sharding) -> None:
        """The full value under the value's name; the part gets another one."""
        name = str(value.name)
        self._rename(value, f"{name}/part")
        full = self._node(op_type, [value], name, after=value, like=value, attributes=self._of_cut(cut))
        if full.shape is not None and cut.blocks:
            sizes = list(full.shape)
            sizes[cut.axis] = sum(cut.blocks)
            full.shape = ir.Shape(sizes)
        self._replace_output(value, full)

    def _replace_output(self, value: ir.Value, other: ir.Value) -> None:
        for place, output in enumerate(self.graph.outputs):
            if output is value:
                self.graph.outputs[place] = other

    def _of_cut(self, cut: Sharding) -> dict[str, ir.Attr]:
        return {
            "cut_axis": ir.AttrInt64("cut_axis", cut.axis),
            "blocks": ir.AttrInt64s("blocks", list(cut.blocks)),
            "rank": ir.AttrInt64("rank", self.rank),
            "size": ir.AttrInt64("size", self.plan.size),
        } | ({"parts": ir.AttrInt64s("parts", list(cut.parts))} if cut.parts else {})

    def _node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value],
        name: str,
        *,
        after: ir.Value,
        like: ir.Value | None,
        domain: str = DOMAIN,
        attributes: dict[str, ir.Attr] | None = None,
    ) -> ir.Value:
        """A new node right after the one that computes `after` (first of all, if none does)."""
        node = self.new_node(op_type, inputs, name, domain=domain, copied=(attributes or {}).values())
        result = node.outputs[0]
        if like is not None:
            result.type, result.shape = like.type, like.shape
        producer = after.producer()
        if producer is not None:
            self.graph.insert_after(producer, node)
        else:
            self.graph.insert_before(self.graph[0], node)
        return result

    def _rename(self, value: ir.Value, name: str) -> None:
        """Gives a value another name, and its own free."""
        self._taken.discard(str(value.name))
        value.name = self.unique(name)
