"""The batch followed through a graph: the shape of every value with a large prime instead of the batch size.

Shapes come from ONNX's own shape inference, node by node; integers that follow from shapes are computed as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onward.graph.nodes.node_writer import Attribute, NodeFactory
from onward.graph.nodes.structure import label

BATCH = 999_983
"""A prime that stands for the batch: sizes of axes that hold it are its multiples, others are none."""
_LARGEST_KNOWN = 256
"""Integers of so many elements may be shapes; their numbers are followed."""
_KEEPS_SHAPE = frozenset({"BiasGelu", "FastGelu", "Gelu", "QuickGelu", "SimplifiedLayerNormalization"})
"""Operators of onnxruntime whose output has the shape of their first input."""


class NotRebatched(Exception):
    """Why a graph cannot compute another number of samples; the text continues after "because"."""


class BatchFollower(NodeFactory):
    """What is known of a graph's values, in order.

    Attributes:
        types: of each value so far, with the prime for the batch.
        known: integers that follow from shapes and constants.
        outside: how many elements of its own axis are outside of the batch, where that is not the outermost factor:
            5 of an axis in which 5 steps of a sequence were joined with the batch.
    """

    def __init__(self, model: ir.Model, size: int) -> None:
        super().__init__(model)
        self.size = size
        self.types: dict[ir.Value, onnx.TypeProto] = {}
        self.known: dict[ir.Value, np.ndarray] = {}
        self.outside: dict[ir.Value, int] = {}
        self.changes: Counter[str] = Counter()
        self._batch: ir.Value | None = None

    def start(self) -> tuple[str, ...]:
        """Puts the batch into the inputs; returns those whose first axis holds it."""
        inputs = []
        for value in self.graph.inputs:
            if value.is_initializer() or not isinstance(value.type, ir.TensorType):
                continue
            dims = None if value.shape is None else list(value.shape)
            if dims and dims[0] == self.size:
                dims[0] = BATCH
                inputs.append(str(value.name))
            self.types[value] = _type(value.dtype, dims)
        for initializer in self.graph.initializers.values():
            self.add_initializer(initializer)
        return tuple(inputs)

    def add_initializer(self, value: ir.Value) -> None:
        """Takes up a stored tensor: its type, and the numbers of a small one of integers."""
        tensor = value.const_value
        assert tensor is not None
        self.types[value] = _type(tensor.dtype, list(tensor.shape.numpy()))
        if tensor.dtype.is_integer() and tensor.size <= _LARGEST_KNOWN:
            self.known[value] = np.asarray(tensor.numpy())

    def dims(self, value: ir.Value | None) -> list[int | None] | None:
        """Sizes of a value with the prime for the batch; None for those that are open, or where the rank is."""
        found = None if value is None else self.types.get(value)
        if found is None or not found.HasField("tensor_type") or not found.tensor_type.HasField("shape"):
            return None
        return [dim.dim_value if dim.HasField("dim_value") else None for dim in found.tensor_type.shape.dim]

    def dtype(self, value: ir.Value) -> ir.DataType | None:
        """The element type of a value, as far as it is known."""
        found = self.types.get(value)
        kind = found.tensor_type.elem_type if found is not None and found.HasField("tensor_type") else 0
        return ir.DataType(kind) if kind else value.dtype

    def batch_axis(self, value: ir.Value | None) -> int | None:
        """The axis that holds the batch."""
        axes = [axis for axis, size in enumerate(self.dims(value) or ()) if size and size % BATCH == 0]
        return axes[0] if axes else None

    def follow_outside(self, node: ir.Node) -> None:
        """Where the batch is within its axis stays as it is where the axis does."""
        found = [(self._batch_sizes(value), self.outside[value]) for value in node.inputs if value in self.outside]
        for output in node.outputs:
            for size, outside in found:
                if output not in self.outside and outside > 1 and size == self._batch_sizes(output) != 0:
                    self.outside[output] = outside

    def _batch_sizes(self, value: ir.Value | None) -> int:
        axis, dims = self.batch_axis(value), self.dims(value)
        return 0 if axis is None or dims is None else dims[axis] or 0

    def loses_batch(self, node: ir.Node) -> bool:
        """Whether what a node computes is known to hold no batch, and is more than a shape."""
        for value in node.outputs:
            dims = self.dims(value)
            if value.name and dims is not None and None not in dims and self.batch_axis(value) is None:
                return value not in self.known
        return False

    def infer(self, node: ir.Node) -> None:
        """The types of what a node computes.

        Raises:
            NotRebatched: the operator does not take these shapes, or its shapes are not known.
        """
        inputs = [value for value in node.inputs if value is not None]
        try:
            schema = onnx.defs.get_schema(node.op_type, self.opset, node.domain)
        except onnx.defs.SchemaError:
            self._assume(node)
            return
        proto = ir.to_proto(node)
        types = {str(value.name): self.types[value] for value in inputs if value in self.types}
        data = {
            str(value.name): onnx.numpy_helper.from_array(self.known[value], str(value.name))
            for value in inputs
            if value in self.known
        }
        imports = [onnx.helper.make_opsetid(domain, version) for domain, version in self.model.opset_imports.items()]
        try:
            found = onnx.shape_inference.infer_node_outputs(schema, proto, types, data, opset_imports=imports)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise NotRebatched(f"{label(node)} does not allow another batch size ({reason})") from error
        for value in node.outputs:
            if value.name in found:
                self.types[value] = found[value.name]
        self._assume(node)

    def _assume(self, node: ir.Node) -> None:
        """Shapes that inference does not give: as declared, with the batch where the first input has it."""
        first = node.inputs[0] if node.inputs else None
        axis = self.batch_axis(first)
        for value in node.outputs:
            if self.dims(value) is not None or not value.name:
                continue
            dims = None if value.shape is None else [one if isinstance(one, int) else None for one in value.shape]
            if node.op_type in _KEEPS_SHAPE:
                dims = self.dims(first)
            elif dims and axis is not None and axis < len(dims) and dims[axis] == self.size:
                dims[axis] = BATCH
            elif axis is not None and dims is None:
                raise NotRebatched(f"the output shape of {label(node)} is unknown")
            self.types[value] = _type(value.dtype, dims)

    def follow_numbers(self, node: ir.Node) -> None:
        """Numbers of shapes that the graph computes."""
        output = node.outputs[0] if node.outputs else None
        if node.domain != "" or output is None or len(node.outputs) != 1:
            return
        if node.op_type == "Shape":
            dims = self.dims(node.inputs[0])
            if dims is not None and None not in dims:
                given = (node.attributes.get(name) for name in ("start", "end"))
                start, end = (None if one is None else one.as_int() for one in given)
                self.known[output] = np.asarray(dims[start:end], np.int64)
            return
        inputs = [value for value in node.inputs if value is not None]
        if not inputs or any(value not in self.known for value in inputs):
            return
        proto = onnx.helper.make_model(
            onnx.helper.make_graph(
                [ir.to_proto(node)],
                "numbers",
                [onnx.helper.make_value_info(str(v.name), self.types[v]) for v in dict.fromkeys(inputs)],
                [onnx.helper.make_empty_tensor_value_info(str(output.name))],
            ),
            opset_imports=[onnx.helper.make_opsetid("", self.opset)],
        )
        from onnx.reference import ReferenceEvaluator  # 20 modules that no other graph needs

        try:
            (result,) = ReferenceEvaluator(proto).run(None, {str(v.name): self.known[v] for v in inputs})
        except Exception:
            return  # not arithmetic on shapes after all
        if isinstance(result, np.ndarray | np.generic) and np.asarray(result).dtype.kind in "iub":
            self.known[output] = np.asarray(result)

    def numbers(self, node: ir.Node, place: int) -> np.ndarray | None:
        """What is known of an input that holds integers."""
        value = node.inputs[place] if len(node.inputs) > place else None
        return None if value is None else self.known.get(value)

    def repeat(self, before: ir.Node, value: ir.Value | None, axis: int, rank: int) -> ir.Value:
        """A value that is the same for all samples, repeated for each along an axis."""
        ones = [self.constant(np.ones(1, np.int64), "one") for _ in range(rank)]
        ones[axis] = self.batch_size(before)
        shape = ones[0] if rank == 1 else self.insert(before, "Concat", ones, {"axis": 0})[0]
        (expanded,) = self.insert(before, "Expand", [value, shape])
        return expanded

    def batch_size(self, before: ir.Node) -> ir.Value:
        """The number of samples, a tensor of one element."""
        if self._batch is None:
            source = next(value for value in self.graph.inputs if self.batch_axis(value) == 0)
            first = next(iter(self.graph))
            (shape,) = self.insert(first, "Shape", [source])
            (self._batch,) = self.insert(first, "Gather", [shape, self.constant(np.zeros(1, np.int64), "first")])
        return self._batch

    def insert(
        self,
        before: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Attribute] | None = None,
    ) -> tuple[ir.Value, ...]:
        """A node before another, with the shape of what it computes."""
        node = self.new_node(op_type, inputs, f"rebatched/{op_type}", attributes)
        self.graph.insert_before(before, node)
        self.infer(node)
        self.follow_numbers(node)
        return tuple(node.outputs)

    def constant(self, array: np.ndarray, name: str) -> ir.Value:
        """Adds an initializer."""
        value = self.store(array, f"rebatched/{name}")
        self.add_initializer(value)
        return value

    def set_input(self, node: ir.Node, place: int, array: np.ndarray) -> None:
        """Lets a node read stored integers instead of those it has."""
        node.replace_input_with(place, self.constant(array, f"{node.name or node.op_type}_sizes"))
        self.changes[node.op_type] += 1


def _type(dtype: ir.DataType | None, dims: Sequence[object] | None) -> onnx.TypeProto:
    shape = None if dims is None else [one if isinstance(one, int) else None for one in dims]
    return onnx.helper.make_tensor_type_proto(int(dtype or ir.DataType.UNDEFINED), shape)
