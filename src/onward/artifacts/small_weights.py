"""Small weights are updated as one vector: a node takes a runtime about a microsecond, however few elements it has.

A MobileNet has 104 scales and shifts of batch normalizations; each of them alone takes 13 nodes of AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onward.artifacts.update_formulas import shapes_of_slots
from onward.graph.nodes.node_writer import NodeWriter
from onward.optim.building import attributes_of_weight
from onward.optimizers.registry import optimizer_named
from onward.parameters import Optimizer

_MOST_ELEMENTS = 4096
"""Of a weight that is copied into a vector and back, which takes as long as half of an update of it."""


def update_groups(
    optimizer: Optimizer, weights: Mapping[str, ir.Value], gradients: Mapping[str, ir.Value]
) -> list[list[str]]:
    """Names of weights that are updated together: one alone, or small ones whose elements are updated alike."""
    kind = optimizer.training_optimizer_name
    is_elementwise = optimizer_named(kind).is_elementwise
    groups = dict[tuple[Any, ...], list[str]]()
    for name, weight in weights.items():
        key: tuple[Any, ...] = (name,)
        if is_elementwise and weight.shape is not None and math.prod(weight.shape.numpy()) <= _MOST_ELEMENTS:
            attributes, shape = attributes_of_weight(optimizer, name), weight.shape.numpy()
            if all(slot == shape for slot in shapes_of_slots(kind, attributes, shape).values()):
                key = (weight.dtype, gradients[name].dtype, *sorted((n, repr(a)) for n, a in attributes.items()))
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def join_tensors(writer: NodeWriter, values: Sequence[ir.Value]) -> ir.Value:
    """Appends what makes one vector of some tensors, of one tensor the tensor itself."""
    if len(values) == 1:
        return values[0]
    flat = writer.constant([-1], "flat")
    vectors = [value if _rank(value) == 1 else writer.apply("Reshape", value, flat) for value in values]
    joined = writer.apply("Concat", *vectors, name="joined", axis=0)
    joined.type = None if values[0].dtype is None else ir.TensorType(values[0].dtype)
    return joined


def separate_tensors(writer: NodeWriter, joined: ir.Value, like: Sequence[ir.Value]) -> list[ir.Value]:
    """Appends what makes tensors of the shapes of some others of a vector, in their order."""
    if len(like) == 1:
        return [joined]
    shapes = [list(value.shape.numpy()) for value in like if value.shape is not None]
    sizes = writer.constant([math.prod(shape) for shape in shapes], "sizes")
    node = writer.new_node("Split", [joined, sizes], f"{writer.prefix}separate", {"axis": 0}, outputs=len(like))
    writer.graph.append(node)
    parts = [
        part if len(shape) == 1 else writer.reshape(part, shape)
        for part, shape in zip(node.outputs, shapes, strict=True)
    ]
    for part in parts:
        part.type = joined.type
    return parts


def _rank(value: ir.Value) -> int:
    """The number of axes, -1 if it is not known."""
    return -1 if value.shape is None else len(value.shape)
