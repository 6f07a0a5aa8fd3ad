"""Products that read packed weights, written out as a dequantization and a matmul, which are adapted like all others.

The lowering of such a product computes the same numbers; in this form the weight has a norm, and an axis to shard.
"""

from __future__ import annotations

import onnx_ir as ir

from onward.graph.adapters.inserting import Inserter, InsertionPoint
from onward.graph.adapters.uses import MICROSOFT
from onward.graph.fusion.rewriting import DOMAIN as FUSED
from onward.graph.nodes.known_values import integer
from onward.graph.weights.quantized_weights import PACKED


def unpack_products(model: ir.Model) -> None:
    """Rewrites the products of a model that read stored packed weights, in place."""
    inserter = Inserter(model)
    for node in tuple(model.graph):
        packed = node.inputs[1] if node.domain == MICROSOFT and node.op_type in PACKED else None
        if packed is None or not packed.is_initializer() or integer(node, "weight_prepacked", 0):
            continue
        _unpack(inserter, node, packed)


def _unpack(to: Inserter, node: ir.Node, packed: ir.Value) -> None:
    data, scales, place = node.inputs[0], node.inputs[2], InsertionPoint(to.graph, node)
    assert data is not None
    assert scales is not None
    to.begin(f"{packed.name}", node)
    rows, columns = integer(node, "N", 0), integer(node, "K", 0)
    sizes = {"block_size": integer(node, "block_size", 0)}
    is_turned = node.op_type == "MatMulNBits" or bool(integer(node, "transB", 1))
    if node.op_type == "MatMulNBits":
        read = [packed, *node.inputs[2:5]]
        attributes = sizes | {"bits": integer(node, "bits", 4), "columns": columns}
        weight = to.write(place, "DequantizeNBits", *read, domain=FUSED, **attributes)
    else:
        shape = (rows, columns) if is_turned else (columns, rows)
        kind = integer(node, "quant_type", 1)
        weight = to.write(place, "DequantizeBnb4", packed, scales, domain=FUSED, quant_type=kind, shape=shape, **sizes)
    weight.type, weight.shape = scales.type, ir.Shape((rows, columns) if is_turned else (columns, rows))
    if data.dtype is not None and data.dtype != weight.dtype:
        weight = to.write(place, "Cast", weight, to=int(data.dtype))
        weight.type, weight.shape = data.type, ir.Shape((rows, columns) if is_turned else (columns, rows))
    result = to.write(place, "MatMul", data, to.transposed(place, weight) if is_turned else weight)
    if len(node.inputs) > 5 and node.inputs[5] is not None:
        result.shape = node.outputs[0].shape
        result = to.write(place, "Add", result, node.inputs[5])
    readers = [(use.node, use.idx) for use in node.outputs[0].uses()]
    to.take_over(node.outputs[0], result, readers)
    to.graph.remove(node, safe=True)
