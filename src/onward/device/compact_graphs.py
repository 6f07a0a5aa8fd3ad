"""Graphs of a bundle without what no runtime reads, which was up to two thirds of their files.

Left out: where the exporter found a node (with paths of the machine it ran on), documentation, types and long names of
values inside of a step, and large constants whose elements are all the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from onward.graph.nodes.node_writer import NodeWriter

_FEWEST_BYTES = 1024
"""Of a constant that is written as one element and its shape."""

_EXPANDED = frozenset(
    {ir.DataType[f"{kind}{bits}"] for kind in ("INT", "UINT") for bits in (8, 16, 32, 64)}
    | {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BOOL}
)
"""What onnxruntime expands: not bfloat16, nor elements of fewer bits than 8, nor FP8."""


def drop_descriptions(model: ir.Model) -> None:
    """Removes documentation and notes of nodes and values; names, and the notes of the model itself, stay."""
    for node in _nodes(model):
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
            value.doc_string = None
    for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
        value.doc_string = None


def shorten_names(model: ir.Model) -> None:
    """Numbers nodes and all values but the model's inputs and outputs; types inside are inferred by runtimes."""
    graph = model.graph
    graphs, kept = (graph, *graph.subgraphs()), {*graph.inputs, *graph.outputs}
    declared = {value for one in graphs for value in (*one.inputs, *one.outputs)}
    taken = {str(value.name) for value in kept}
    names = (name for number in range(1 << 31) if (name := f"v{number}") not in taken)
    inside = [value for one in graphs for value in (*one.inputs, *one.initializers.values())]
    for number, node in enumerate(_nodes(model)):
        node.name = str(number)
        inside += node.outputs
    for value in dict.fromkeys(inside):
        if value in kept:
            continue
        value.name = next(names)
        if value not in declared and value.const_value is None:
            value.type, value.shape = None, None


def write_uniform_constants_once(model: ir.Model) -> int:
    """Replaces large constants of equal elements by one of them, expanded, which runtimes do when they load a graph.

    Returns:
        How many there were.
    """
    writer, graph, count = NodeWriter(model, "uniform/"), model.graph, 0
    first = next(iter(graph), None)
    for value in list(graph.initializers.values()):
        tensor = value.const_value
        if tensor is None or first is None or value.is_graph_input() or value.is_graph_output():
            continue
        if tensor.dtype not in _EXPANDED or tensor.nbytes < _FEWEST_BYTES:
            continue
        elements = tensor.numpy()
        if elements.tobytes() != np.broadcast_to(elements.flat[0], elements.shape).tobytes():
            continue
        element = writer.store(np.array(elements.flat[0]), f"{value.name}_element")
        sizes = writer.store(np.array(elements.shape, np.int64), f"{value.name}_sizes")
        node = writer.new_node("Expand", [element, sizes], "uniform/expand")
        node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
        graph.insert_before(first, node)
        writer.substitute(value, node.outputs[0])
        graph.initializers.pop(str(value.name))
        count += 1
    return count


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    return iter(ir.traversal.RecursiveGraphIterator(model.graph))
