"""What the builder asks of a node: its label for messages, its named outputs, the type of a result on the host."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch
from torch import fx

from onward.graph.nodes.provenance import module_scope
from onward.lowering.building.bound_value import BoundValue
from onward.lowering.kernels.dtypes import TORCH_DTYPE, torch_dtype
from onward.lowering.kernels.host import host_shape
from onward.lowering.program import NodeLabel
from onward.lowering.registry import Lowering


def label_of(node: ir.Node) -> NodeLabel:
    """What messages call a node: its name or that of its first output, its operator, its module."""
    name = node.name or (node.outputs[0].name or "unnamed" if node.outputs else "unnamed")
    return NodeLabel(name, node.op_type, module_scope(node))


def last_named_output(node: ir.Node) -> int:
    """How many outputs a node has up to the last that has a name."""
    count = len(node.outputs)
    while count > 0 and not node.outputs[count - 1].name:
        count -= 1
    return count


def note_on_host(node: fx.Node) -> fx.Node:
    """Notes of a step of the program that it computes a number, or several, and no tensor."""
    node.meta["is_host"] = True
    return node


def is_float(data_type: ir.DataType) -> bool:
    """Whether an element type is neither an integer nor a truth value."""
    return not data_type.is_integer() and data_type is not ir.DataType.BOOL


def cuts_table(node: ir.Node, inputs: Sequence[BoundValue]) -> bool:
    """Whether a node cuts a known table at places that are known only when the program runs.

    Shapes are lists; rows of a table are data, and as Python numbers they would fix how many of them there are.
    """
    if node.op_type != "Slice" or not inputs[0].known or all(bound.known for bound in inputs):
        return False
    return len(host_shape(inputs[0].host)) > 1


def host_result_dtype(node: ir.Node, lowering: Lowering, inputs: Sequence[BoundValue]) -> torch.dtype | None:
    """The element type that the result of an operator computed in Python has in the graph."""
    rule = lowering.result_dtype
    if rule == "first":
        return inputs[0].dtype
    if rule == "second":
        return inputs[1].dtype
    if rule == "value":
        return torch_dtype(node.attributes["value"].as_tensor().dtype, f"{label_of(node)}: attribute 'value'")
    if rule == "to":
        return torch_dtype(node.attributes["to"].as_int(), f"{label_of(node)}: attribute 'to'")
    return TORCH_DTYPE[ir.DataType[rule.upper()]]
