"""Writing real arithmetic instead of quantized operators: nodes before another, constants, values that take over.

A quantized tensor becomes real by a `DequantizeLinear`, stored ones included; `stored.py` makes weights of those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onward.graph.nodes.node_writer import Attribute, NodeFactory


@dataclass(frozen=True)
class Quantized:
    """A quantized tensor with its scale and zero point, per tensor, or per index of an axis."""

    tensor: ir.Value
    scale: ir.Value
    zero_point: ir.Value | None
    axis: int | None = None


class RealWriter(NodeFactory):
    """Rewrites the main graph of a model."""

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
        node = self.new_node(op_type, inputs, stem, attributes, domain=domain, copied=copied, outputs=outputs)
        self.graph.insert_before(before, node)
        return tuple(node.outputs)

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

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Lets a new value take the place and the name of an old one, whose node goes where nobody reads it."""
        node = old.producer()
        self.substitute(old, new)
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
