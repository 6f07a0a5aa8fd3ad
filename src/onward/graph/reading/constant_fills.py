"""Weights that a model stores as fills: `ConstantOfShape` nodes instead of initializers.

The `light_*` models of the onnx package are written so, and tools that strip weights write them too.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.graph.operators import Fact, operator

_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


def fold_constant_fills(model: ir.Model) -> None:
    """Turns each float `ConstantOfShape` of a stored shape that feeds a weight into an initializer of its name.

    It feeds a weight if every node that reads it reads it instead of a parameter: of a convolution, a matrix
    product, a normalization, a recurrent net; or, rearranged, as factor or summand of channels. The other fills
    (initial states, masks) stay nodes. The new tensors are views of one number until they are used.
    """
    for node in list(model.graph):
        if node.op_type != "ConstantOfShape" or node.domain != "":
            continue
        output = node.outputs[0]
        filled = _filled(node)
        if filled is None or output.is_graph_output() or not _feeds_weight(output):
            continue
        weight = ir.Value(
            name=output.name, type=ir.TensorType(filled.dtype), shape=ir.Shape(filled.shape.numpy()), const_value=filled
        )
        output.replace_all_uses_with(weight)
        model.graph.remove(node, safe=True)
        model.graph.register_initializer(weight)


def _filled(node: ir.Node) -> ir.TensorProtocol | None:
    """The tensor that a fill of a stored shape gives, if it is of floats and has more than one element."""
    sizes = None if node.inputs[0] is None else node.inputs[0].const_value
    value = node.attributes.get("value")
    number = np.zeros(1, np.float32) if value is None else value.as_tensor().numpy()
    dtype = ir.DataType.FLOAT if value is None else value.as_tensor().dtype
    if sizes is None or dtype not in _FLOATS:
        return None
    shape = tuple(int(size) for size in sizes.numpy().reshape(-1))
    if int(np.prod(shape)) <= 1:
        return None
    return ir.Tensor(np.broadcast_to(number.reshape(()), shape), dtype=dtype, name=node.outputs[0].name)


def _feeds_weight(value: ir.Value, rearranged: bool = False) -> bool:
    uses = value.uses()
    return bool(uses) and all(_is_parameter(use.node, use.idx, rearranged) for use in uses)


def _is_parameter(node: ir.Node, index: int, rearranged: bool) -> bool:
    if node.domain != "":
        return False
    known = operator(node.op_type)
    if known.is_parameter(index) or known.is_running_statistic(index) or (node.op_type == "Gather" and index == 0):
        return True
    if Fact.SAME_ELEMENTS in known.facts and index == 0:
        return _feeds_weight(node.outputs[0], rearranged=True)
    return rearranged and node.op_type in ("Mul", "Add")
