"""How training finds scales: by gradients, scaled as LSQ has it, or by moving averages, as running statistics."""

from __future__ import annotations

import onnx_ir as ir

from onward.graph.nodes.node_writer import NodeWriter
from onward.graph.quantize_aware.quantizers import Quantizer, quantizers_of, quantizing_nodes

DOMAIN = "onward.fused"


def train_scales(source: ir.Model, model: ir.Model) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Puts what finds the scales between them and the nodes that read them, in place.

    Args:
        source: the user's own graph with the nodes of quantization.
        model: what is computed, changed.

    Returns:
        The scales that are weights, and those that are running statistics.
    """
    nodes = quantizing_nodes(model.graph)
    by_scale = {one.scale: one for one in quantizers_of(source) if one.value in nodes}
    for scale, quantizer in by_scale.items():
        _find_by_training(model, model.graph.initializers[scale], quantizer, nodes[quantizer.value])
    trained = tuple(name for name, one in by_scale.items() if one.observer == "lsq")
    return trained, tuple(name for name in by_scale if name not in trained)


def _find_by_training(model: ir.Model, scale: ir.Value, quantizer: Quantizer, first: ir.Node) -> None:
    graph, writer, readers = model.graph, NodeWriter(model, ""), [(use.node, use.idx) for use in scale.uses()]
    model.opset_imports.setdefault(DOMAIN, 1)
    found = ir.Value(name=writer.unique(f"{scale.name}_found"), type=scale.type, shape=scale.shape)
    inputs, op_type = [scale], "ScaleGradient"
    attributes = [ir.AttrFloat32("factor", (quantizer.elements * quantizer.largest) ** -0.5)]
    if quantizer.observer == "moving_average":
        inputs, op_type = [first.inputs[0], scale], "MovingScale"  # type: ignore[list-item]
        attributes = [ir.AttrFloat32("span", quantizer.largest + (0.5 if quantizer.is_signed else 0.0))]
        if quantizer.axis is not None:
            attributes.append(ir.AttrInt64("axis", quantizer.axis))
    if quantizer.largest_scale is not None:
        attributes.append(ir.AttrFloat32("largest", quantizer.largest_scale))
    name = writer.unique_node_name(f"{scale.name}/found")
    node = ir.Node(DOMAIN, op_type, inputs, attributes, outputs=[found], name=name)
    graph.insert_before(min((one for one, _ in readers), key=list(graph).index), node)
    for reader, index in readers:
        reader.replace_input_with(index, found)
