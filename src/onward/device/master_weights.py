"""fp32 master weights of a graph that computes in 16 bits: inputs in fp32, which the graph casts."""

from __future__ import annotations

import onnx_ir as ir

from onward.graph.nodes.node_writer import NodeWriter

FLOAT = ir.DataType.FLOAT


def master_of(writer: NodeWriter, weight: ir.Value) -> ir.Value:
    """The input that takes a weight in at least float32: of one in 16 bits a new one, which the graph casts.

    Nodes are appended: the caller sorts the graph.
    """
    assert weight.dtype is not None
    if weight.dtype not in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        return weight
    graph, name = writer.graph, str(weight.name)
    index = next(place for place, value in enumerate(graph.inputs) if value is weight)
    master = ir.Value(name=name, type=ir.TensorType(FLOAT), shape=weight.shape)
    cast = writer.cast(master, weight.dtype)
    cast.type = ir.TensorType(weight.dtype)
    weight.replace_all_uses_with(cast)
    weight.name = writer.unique(f"{writer.prefix}{name}")
    graph.inputs[index] = master
    return master
