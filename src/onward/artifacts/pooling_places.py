"""Where the maxima of a pooling are, without the second pooling that torch's exporter finds them with."""

from __future__ import annotations

import math

import onnx_ir as ir

from onward.graph.nodes.node_writer import NodeWriter


def compute_places_directly(model: ir.Model) -> int:
    """Replaces poolings by windows of one element, of which only the places are read.

    `MaxPool` counts places over the entire tensor. torch's exporter makes them those of a plane by subtracting the
    place of each plane's first element, which it reads from a second `MaxPool` of the entire input. They are the
    remainder of a division by the plane's size, too.

    Returns:
        How many there were.
    """
    writer, count = NodeWriter(model, "places/"), 0
    for node in list(model.graph):
        difference = _difference_from_first(node)
        if difference is None:
            continue
        count += 1
        entering, kernel = node.inputs[0], node.attributes["kernel_shape"].as_ints()
        assert entering is not None
        places = difference.inputs[0]
        new = writer.new_node(
            "Mod", [places, _plane_size(writer, difference, entering, len(kernel))], "places/in_plane"
        )
        model.graph.insert_before(difference, new)
        writer.substitute(difference.outputs[0], new.outputs[0])
        model.graph.remove(difference, safe=True)
    return count


def _difference_from_first(node: ir.Node) -> ir.Node | None:
    """The `Sub` that takes the places of a pooling by windows of one element from those of another, if there is one."""
    if node.op_type != "MaxPool" or len(node.outputs) != 2 or node.outputs[0].uses():
        return None
    kernel, strides = node.attributes.get("kernel_shape"), node.attributes.get("strides")
    if kernel is None or {*kernel.as_ints(), *(strides.as_ints() if strides is not None else ())} != {1}:
        return None
    slices = node.outputs[1].consumers()
    if len(slices) != 1 or slices[0].op_type != "Slice":
        return None
    differences = slices[0].outputs[0].consumers()
    if len(differences) != 1 or differences[0].op_type != "Sub" or differences[0].inputs[1] is not slices[0].outputs[0]:
        return None
    pooling = None if differences[0].inputs[0] is None else differences[0].inputs[0].producer()
    is_pooling_of_same = pooling is not None and pooling.op_type == "MaxPool" and pooling.inputs[0] is node.inputs[0]
    return differences[0] if is_pooling_of_same else None


def _plane_size(writer: NodeWriter, before: ir.Node, value: ir.Value, axes: int) -> ir.Value:
    sizes = () if value.shape is None else value.shape[-axes:]
    if sizes and all(isinstance(size, int) for size in sizes):
        return writer.constant(math.prod(int(size) for size in sizes if isinstance(size, int)), "plane_size")
    shape = writer.new_node("Shape", [value], "places/sizes", {"start": 2})
    size = writer.new_node("ReduceProd", shape.outputs, "places/plane_size", {"keepdims": 0})
    writer.graph.insert_before(before, (shape, size))
    return size.outputs[0]
