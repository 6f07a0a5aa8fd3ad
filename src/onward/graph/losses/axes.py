"""Where an axis of a value comes from: the class axis of a prediction, followed back through nodes that move elements.

Reads shapes from the model, and from ONNX's shape inference where the model leaves them out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np
import onnx_ir as ir

from onward.graph.nodes.shape_inference import inferred_values

_REDUCED_AXES_AS_INPUT = {"ReduceSum": 13, "ReduceMean": 18}


class AxisTracker:
    """Answers questions about the axes of a model's values; axes count from the front.

    Args:
        model: whose opset and shapes count.
    """

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._opset = model.opset_imports.get("", 1)

    @cached_property
    def _inferred(self) -> Mapping[str, ir.Value]:
        return inferred_values(self._model)

    def shape(self, value: ir.Value | None) -> tuple[int | str | None, ...] | None:
        """Sizes of a value: numbers, names, or None each; None where even the rank is unknown."""
        if value is None:
            return None
        found = value.shape
        if found is None and value.const_value is None:
            inferred = self._inferred.get(str(value.name))
            found = None if inferred is None else inferred.shape
        if found is None:
            return None
        return tuple(size if isinstance(size, int) else size.value for size in found)

    def is_softmax_over(self, node: ir.Node, axis: int | None) -> bool:
        """Whether a `Softmax` or `LogSoftmax` node normalizes exactly along an axis of its output (None: any)."""
        if axis is None:
            return True
        given = node.attributes.get("axis")
        own = given.as_int() if given is not None else (-1 if self._opset >= 13 else 1)
        shape = self.shape(node.outputs[0]) or self.shape(node.inputs[0])
        if shape is None:
            return own == axis == -1
        own, axis = own % len(shape), axis % len(shape)
        if self._opset >= 13:
            return own == axis
        # Before opset 13, Softmax flattens everything from its axis on.
        return axis >= own and all(size == 1 or index == axis for index, size in enumerate(shape) if index >= own)

    def divides_by_sum(self, node: ir.Node, axis: int | None) -> bool:
        """Whether a `Div` divides a value by its own sum along an axis of it (None: any one axis).

        Converters from JAX and TensorFlow drop the axis of the sum, and reshape and expand it back.
        """
        if len(node.inputs) < 2 or node.inputs[0] is None:
            return False
        value, divisor = node.inputs[0], self._unexpanded(node.inputs[1])
        total, is_moved = self._sum_before(divisor)
        axes = None if total is None or total.inputs[0] is not value else self._reduced(total)
        if total is None or axes is None or len(axes) != 1:
            return False
        shape = self.shape(node.outputs[0]) or self.shape(value)
        kept = total.attributes.get("keepdims")
        if (is_moved or (kept is not None and kept.as_int() == 0)) and not self._keeps_axis(divisor, axes[0], shape):
            return False
        return axis is None or self._same(axes[0], axis, shape)

    def _unexpanded(self, value: ir.Value | None) -> ir.Value | None:
        """What an `Expand` repeats; the value itself otherwise."""
        node = None if value is None else value.producer()
        while node is not None and node.domain == "" and node.op_type in ("Expand", "Identity"):
            value = node.inputs[0]
            node = None if value is None else value.producer()
        return value

    def _sum_before(self, value: ir.Value | None) -> tuple[ir.Node | None, bool]:
        """The `ReduceSum` that a value is reshaped from, and whether it is reshaped at all."""
        node, is_moved = (None if value is None else value.producer()), False
        while node is not None and node.domain == "" and node.op_type in ("Reshape", "Unsqueeze", "Squeeze"):
            node, is_moved = (None if node.inputs[0] is None else node.inputs[0].producer()), True
        return (node if node is not None and node.op_type == "ReduceSum" else None), is_moved

    def _keeps_axis(self, total: ir.Value | None, axis: int, shape: tuple[int | str | None, ...] | None) -> bool:
        """Whether a sum along an axis has size 1 there, so that each element is divided by its own sum.

        Reshape keeps the order of elements: with the rank of the value and size 1 at the axis, all others are in place.
        """
        sizes = self.shape(total)
        return sizes is not None and shape is not None and len(sizes) == len(shape) and sizes[axis % len(shape)] == 1

    def before(self, node: ir.Node, axis: int) -> int | None:
        """The axis of the node's first input that holds the elements along an axis of its output; None: unknown."""
        op_type = node.op_type
        if op_type in ("Identity", "Cast"):
            return axis
        before, after = self.shape(node.inputs[0]), self.shape(node.outputs[0])
        if op_type == "Transpose":
            order = node.attributes.get("perm")
            rank = len(order.as_ints()) if order is not None else None if before is None else len(before)
            if rank is None:
                return None
            return order.as_ints()[axis] if order is not None else rank - 1 - axis % rank
        if before is None or after is None:
            return None
        axis %= len(after)
        if op_type in ("Reshape", "Flatten", "Squeeze", "Unsqueeze"):
            return _reshaped_axis(before, after, axis)
        if op_type == "Concat":
            given = node.attributes.get("axis")
            return None if given is None or given.as_int() % len(after) == axis else axis
        if op_type == "Slice":
            return axis if before[axis] is not None and before[axis] == after[axis] else None
        if op_type == "Gather":
            return self._gathered(node, axis, len(before), len(after))
        if op_type == "ReduceMean":
            return self._averaged(node, axis, len(before))
        return None

    def _gathered(self, node: ir.Node, axis: int, rank: int, rank_after: int) -> int | None:
        given = node.attributes.get("axis")
        chosen = 0 if given is None else given.as_int() % rank
        added = rank_after - rank + 1  # axes of the indices, instead of the one they choose from
        if chosen <= axis < chosen + added:
            return None
        return axis if axis < chosen else axis - added + 1

    def _averaged(self, node: ir.Node, axis: int, rank: int) -> int | None:
        axes = self._reduced(node)
        if axes is None:
            return None
        gone = {one % rank for one in axes}
        kept = node.attributes.get("keepdims")
        if kept is not None and kept.as_int() == 0:
            return [one for one in range(rank) if one not in gone][axis]
        return None if axis in gone else axis

    def _reduced(self, node: ir.Node) -> list[int] | None:
        """The axes that a reduction names; None where they are not stored in the model."""
        given = node.attributes.get("axes")
        if given is not None:
            return list(given.as_ints())
        stored = node.inputs[1] if len(node.inputs) > 1 else None
        if stored is None or stored.const_value is None or self._opset < _REDUCED_AXES_AS_INPUT[node.op_type]:
            return None
        return [int(one) for one in np.asarray(stored.const_value.numpy()).reshape(-1)]

    def _same(self, left: int, right: int, shape: tuple[object, ...] | None) -> bool:
        return left == right if shape is None else left % len(shape) == right % len(shape)

    def is_constant(self, value: ir.Value | None, number: float) -> bool:
        """Whether a value is stored in the model and holds nothing but one number."""
        tensor = None if value is None else value.const_value
        if tensor is None or tensor.size != 1:
            return False
        return float(np.asarray(tensor.numpy()).reshape(-1)[0]) == number

    def producer_of_reciprocal(self, node: ir.Node) -> ir.Node | None:
        """The node whose output `node` gives the inverse of."""
        if node.op_type == "Reciprocal":
            inverted = node.inputs[0]
        elif node.op_type == "Div" and self.is_constant(node.inputs[0], 1.0):
            inverted = node.inputs[1]
        else:
            return None
        return None if inverted is None else inverted.producer()

    def summands(self, node: ir.Node | None) -> Iterator[tuple[ir.Value, ir.Value]]:
        """The two inputs of an `Add`, in either order."""
        if node is not None and node.op_type == "Add" and None not in node.inputs:
            first, second = node.inputs
            assert first is not None
            assert second is not None
            yield first, second
            yield second, first

    def clips_to_unit_interval(self, node: ir.Node) -> bool:
        """Whether a `Clip` has stored bounds between 0 and 1."""
        bounds = []
        for place, name in ((1, "min"), (2, "max")):
            given = node.attributes.get(name)
            stored = node.inputs[place] if len(node.inputs) > place else None
            if given is not None:
                bounds.append(given.as_float())
            elif stored is not None and stored.const_value is not None:
                bounds.append(float(np.asarray(stored.const_value.numpy()).reshape(-1)[0]))
        return len(bounds) == 2 and bounds[0] >= 0 and bounds[1] <= 1


def _reshaped_axis(before: tuple[int | str | None, ...], after: tuple[int | str | None, ...], axis: int) -> int | None:
    """The axis that a reshape keeps: of the same size, and with the same sizes behind it, ones aside."""
    size, behind = after[axis], [one for one in after[axis + 1 :] if one != 1]
    if size is None or size == 1 or None in behind:
        return None
    for index, other in enumerate(before):
        if other == size and [one for one in before[index + 1 :] if one != 1] == behind:
            return index
    return None
