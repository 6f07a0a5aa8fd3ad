"""Scalars that meet tensors of trailing axes of size 1 get the tensor's rank, with which runtimes compute fast.

ONNX Runtime broadcasts a scalar over (1280, 320, 1, 1), as 1x1 convolutions have, element by element: 50 times as slow
as over (1280, 320), or as with a scalar of shape (1, 1, 1, 1).
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onward.graph.nodes.node_writer import NodeWriter

_ELEMENTWISE = frozenset(
    [
        "Abs",
        "Add",
        "Cast",
        "Div",
        "Exp",
        "Identity",
        "Log",
        "Max",
        "Min",
        "Mul",
        "Neg",
        "Not",
        "Pow",
        "Reciprocal",
        "Sign",
        "Sqrt",
        "Sub",
        "Sum",
        "Tanh",
        "Where",
    ]
)
_BINARY = frozenset(("Add", "Div", "Mul", "Pow", "Sub"))

Shape = tuple[int, ...]


def align_scalars(model: ir.Model) -> int:
    """Reshapes scalars of elementwise operators whose other operand ends in axes of size 1, where shapes are known.

    Returns:
        How many operands were replaced.
    """
    return _Aligning(model).run()


class _Aligning:
    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.writer = NodeWriter(model, "aligned/")
        self.shapes: dict[ir.Value, Shape] = {}
        self.reshaped: dict[tuple[ir.Value, int], ir.Value] = {}

    def run(self) -> int:
        for value in (*self.model.graph.inputs, *self.model.graph.initializers.values()):
            self._keep(value)
        return sum(self._align(node) for node in list(ir.traversal.RecursiveGraphIterator(self.model.graph)))

    def _keep(self, value: ir.Value) -> None:
        if value.shape is not None and value.shape.is_static():
            self.shapes[value] = tuple(value.shape.numpy())

    def _align(self, node: ir.Node) -> int:
        for result in node.outputs:
            self._keep(result)
        shapes = [self.shapes.get(value) for value in node.inputs if value is not None]
        known = [shape for shape in shapes if shape is not None]
        if node.op_type.startswith("Reduce") and len(node.inputs) == 1 and not _keeps_axes(node):
            self.shapes[node.outputs[0]] = ()
        elif node.op_type == "Gather" and len(known) == 2 and len(known[0]) == 1:
            self.shapes[node.outputs[0]] = known[1]
        if node.op_type not in _ELEMENTWISE or len(known) < len(shapes) or not shapes:
            return 0
        widest = np.broadcast_shapes(*known)
        self.shapes[node.outputs[0]] = widest
        if node.op_type not in _BINARY or not widest or widest[-1] != 1 or math.prod(widest) == 1:
            return 0
        count = 0
        for place, value in enumerate(node.inputs):
            if value is not None and len(self.shapes[value]) < len(widest) and math.prod(self.shapes[value]) == 1:
                node.replace_input_with(place, self._of_rank(value, len(widest)))
                count += 1
        return count

    def _of_rank(self, scalar: ir.Value, rank: int) -> ir.Value:
        key = (scalar, rank)
        if key not in self.reshaped:
            constant = scalar.const_value
            if constant is not None and not scalar.is_graph_input():
                self.reshaped[key] = self.writer.store(constant.numpy().reshape([1] * rank), f"{scalar.name}/{rank}d")
                return self.reshaped[key]
            sizes = self.writer.constant([1] * rank, f"ones_{rank}")
            node = self.writer.new_node("Reshape", [scalar, sizes], f"aligned/{scalar.name}")
            node.outputs[0].type = scalar.type
            producer = scalar.producer()
            if producer is None:
                first = next(iter(self.model.graph))
                self.model.graph.insert_before(first, node)
            else:
                assert producer.graph is not None
                producer.graph.insert_after(producer, node)
            self.reshaped[key] = node.outputs[0]
        return self.reshaped[key]


def _keeps_axes(node: ir.Node) -> bool:
    attribute = node.attributes.get("keepdims")
    return attribute is None or bool(attribute.as_int())
