"""Writing real arithmetic instead of quantized operators: nodes before another, constants, values that take over.

A quantized tensor becomes real by a `DequantizeLinear`, stored ones included; `stored.py` makes weights of those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onward.graph.nodes.node_writer import Attribute, free_name, make_attribute, value_names

MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class Quantized:
    """A quantized tensor with its scale and zero point, per tensor, or per index of an axis."""

    tensor: ir.Value
    scale: ir.Value
    zero_point: ir.Value | None
    axis: int | None = None


class RealWriter:
    """Rewrites the main graph of a model.

    Attributes:
        model, graph: what is rewritten.
        opset: version of the standard domain that the model imports.
    """

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.graph = model.graph
        self.opset = model.opset_imports.get("", 1)
        self._values = value_names(model.graph)
        self._nodes = {str(node.name) for node in model.graph.all_nodes()}

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        before: ir.Node,
        *,
        domain: str = "",
        stem: str = "",
        attributes: Mapping[str, Attribute] | None = None,
        copied: Sequence[ir.Attr] = (),
        outputs: int = 1,
    ) -> tuple[ir.Value, ...]:
        """Inserts a node before another and returns its outputs; `copied` are attributes of another node."""
        stem = f"{before.name or before.op_type}/{stem or op_type}"
        values = tuple(ir.Value(name=free_name(stem, self._values)) for _ in range(outputs))
        given = [*copied, *(make_attribute(key, value) for key, value in (attributes or {}).items())]
        trimmed = list(inputs)
        while trimmed and trimmed[-1] is None:
            trimmed.pop()
        name = free_name(stem, self._nodes)
        self.graph.insert_before(before, ir.Node(domain, op_type, trimmed, given, outputs=values, name=name))
        return values

    def constant(self, array: np.ndarray, name: str) -> ir.Value:
        """Adds an initializer under a name that is free."""
        unique = free_name(name, self._values)
        tensor = ir.Tensor(array, name=unique)
        value = ir.Value(name=unique, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def real(self, quantized: Quantized, before: ir.Node) -> ir.Value:
        """What a quantized tensor stands for."""
        axis = {} if quantized.axis is None else {"axis": quantized.axis}
        inputs = [quantized.tensor, quantized.scale, quantized.zero_point]
        (value,) = self.node("DequantizeLinear", inputs, before, attributes=axis)
        return value

    def quantize(self, value: ir.Value, scale: ir.Value, zero_point: ir.Value | None, before: ir.Node) -> ir.Value:
        """A real value quantized per tensor; without a zero point to uint8."""
        (quantized,) = self.node("QuantizeLinear", [value, scale, zero_point], before)
        return quantized

    def take_over(self, old: ir.Value, new: ir.Value) -> None:
        """Lets a new value take the place and the name of an old one, whose node goes where nobody reads it."""
        node, name = old.producer(), old.name
        new.type, new.shape = new.type or old.type, old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name = free_name(f"{name}/replaced", self._values)
        new.name = name
        unread = node is not None and not any(one.uses() or one.is_graph_output() for one in node.outputs)
        if node is not None and unread and node.graph is self.graph:
            self.graph.remove(node, safe=True)


def stored(value: ir.Value | None) -> np.ndarray | None:
    """The numbers of an initializer; None for other values."""
    if value is None or value.const_value is None:
        return None
    return np.asarray(value.const_value.numpy())


def is_per_tensor(value: ir.Value | None) -> bool:
    """Whether a scale or zero point is known to be of one element; one that is computed is of the full tensor."""
    if value is None:
        return True
    array = stored(value)
    return array is None or array.size == 1


__all__ = ["MICROSOFT", "Quantized", "RealWriter", "is_per_tensor", "stored"]
