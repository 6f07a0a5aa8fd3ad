"""Writing nodes at a place in the middle of a graph, and letting one value take the place and the name of another."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.fusion.rewriting import DOMAIN as FUSED
from onward.graph.nodes.node_writer import Attribute, NodeFactory, make_attribute

_SUMMED_AXES_ARE_INPUT_SINCE = 13
_RATIO_IS_INPUT_SINCE = 12


class InsertionPoint:
    """Where nodes go, one after another: in front of a node, or behind one."""

    def __init__(self, graph: ir.Graph, node: ir.Node, is_behind: bool = False) -> None:
        self._graph, self._node, self._is_behind = graph, node, is_behind

    def insert(self, node: ir.Node) -> None:
        """Inserts a node behind those that were inserted before."""
        if self._is_behind:
            self._graph.insert_after(self._node, node)
            self._node = node
        else:
            self._graph.insert_before(self._node, node)


class Inserter(NodeFactory):
    """Writes nodes and initializers into a model's main graph."""

    def __init__(self, model: ir.Model) -> None:
        super().__init__(model)
        self._stem, self._metadata = "", dict[str, str]()

    def begin(self, stem: str, like: ir.Node) -> None:
        """From now on, names begin with `stem`, and nodes belong to the module of the node `like`."""
        self._stem, self._metadata = stem, dict(like.metadata_props)

    def add_tensor(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        """Adds an initializer of exactly this name.

        Raises:
            ModelError: the model has it already.
        """
        if name in self._taken:
            raise ModelError(
                f"the model already has a value {name!r}, so that it has adapters already. Name them in "
                "training.weights_to_train to train these, or give the model without adapters."
            )
        return self.register_tensor(self.unique(name), tensor)

    def constant(self, array: np.ndarray) -> ir.Value:
        """Adds an initializer that is a constant of the arithmetic."""
        return self.store(array, f"{self._stem}/constant")

    def write(
        self, place: InsertionPoint, op_type: str, *inputs: ir.Value | None, domain: str = "", **attributes: Attribute
    ) -> ir.Value:
        """Inserts a node and returns its one output."""
        return self.write_with(place, op_type, inputs, [make_attribute(*item) for item in attributes.items()], domain)

    def write_with(
        self,
        place: InsertionPoint,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Sequence[ir.Attr],
        domain: str = "",
    ) -> ir.Value:
        """`write` with attributes as onnx-ir has them; every operator written gives the type of its first input."""
        node = self.new_node(op_type, inputs, f"{self._stem}/{op_type.lower()}", domain=domain, copied=attributes)
        node.metadata_props.update(self._metadata)
        if inputs[0] is not None:
            node.outputs[0].type = inputs[0].type
        place.insert(node)
        return node.outputs[0]

    def transposed(self, place: InsertionPoint, value: ir.Value) -> ir.Value:
        """A tensor of known rank with its last two axes swapped."""
        assert value.shape is not None
        rank = len(value.shape)
        result = self.write(place, "Transpose", value, perm=[*range(rank - 2), rank - 1, rank - 2])
        sizes = list(value.shape)
        result.shape = ir.Shape([*sizes[:-2], sizes[-1], sizes[-2]])
        return result

    def reshaped(self, place: InsertionPoint, value: ir.Value, shape: Sequence[int]) -> ir.Value:
        """A tensor in another shape."""
        result = self.write(place, "Reshape", value, self.constant(np.array(shape, np.int64)))
        if -1 not in shape:
            result.shape = ir.Shape(shape)
        return result

    def scaled(self, place: InsertionPoint, value: ir.Value, factor: float, dtype: ir.DataType) -> ir.Value:
        """A tensor times a number."""
        if math.isclose(factor, 1.0, rel_tol=1e-12):
            return value
        return self.write(place, "Mul", value, self.constant(np.array(factor, dtype.numpy())))

    def norm(self, place: InsertionPoint, value: ir.Value, axes: Sequence[int]) -> ir.Value:
        """The Euclidean norm over some axes, which go; the sum may be one over tensor-parallel ranks."""
        squares = self.write(place, "Mul", value, value)
        if self.opset < _SUMMED_AXES_ARE_INPUT_SINCE:
            return self.write(place, "Sqrt", self.write(place, "ReduceSum", squares, axes=axes, keepdims=0))
        numbers = self.constant(np.array(axes, np.int64))
        return self.write(place, "Sqrt", self.write(place, "ReduceSum", squares, numbers, keepdims=0))

    def dropped(self, place: InsertionPoint, value: ir.Value, ratio: float) -> ir.Value:
        """A value after dropout, which is there in training only."""
        if not ratio:
            return value
        if self.opset < _RATIO_IS_INPUT_SINCE:
            return self.write(place, "Dropout", value, ratio=float(ratio))
        return self.write(place, "Dropout", value, self.constant(np.array(ratio, np.float32)))

    def constant_for_gradients(self, place: InsertionPoint, value: ir.Value) -> ir.Value:
        """A value through which no gradient flows."""
        result = self.write(place, "StopGradient", value, domain=FUSED)
        result.shape = value.shape
        return result

    def take_over(self, old: ir.Value, new: ir.Value, readers: Sequence[tuple[ir.Node, int]]) -> None:
        """Lets `new` be read by some readers of `old`, and be the graph's output instead of it, under its name."""
        name = old.name
        new.type, new.shape = old.type, old.shape
        for node, index in readers:
            node.replace_input_with(index, new)
        for index, output in enumerate(self.graph.outputs):
            if output is old:
                self.graph.outputs[index] = new
        old.name = self.unique(f"{name}.unadapted")
        new.name = name
