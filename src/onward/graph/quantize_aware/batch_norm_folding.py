"""Batch normalizations folded into the layers before them, by their running statistics: integer kernels have no place
for them, and what training computes is to be what the exported integer model computes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onward.graph.nodes.known_values import integer
from onward.graph.nodes.node_writer import NodeWriter, original, remove_unread


def fold_batch_norms(model: ir.Model) -> tuple[str, ...]:
    """Folds what can be, in place; notes for the user."""
    found = [node for node in model.graph if (node.domain, node.op_type) == ("", "BatchNormalization")]
    fresh, folded = 0, 0
    for node in found:
        layer = _layer_before(node)
        if layer is not None:
            mean, variance = (_array(value) for value in node.inputs[3:5])
            fresh += bool((mean == 0).all() and (variance == 1).all())
            _fold(NodeWriter(model, ""), layer, node)
            folded += 1
    if not folded:
        return ()
    kept = f"; {len(found) - folded} stay in float" if len(found) > folded else ""
    untrained = (
        f" {fresh} of them have the statistics of a model that was never trained: train the float model first."
        if fresh
        else ""
    )
    return (
        f"quantize_aware: {folded} batch normalizations were folded into the layers before them, with their running "
        f"statistics, for integer kernels{kept}.{untrained}",
    )


def stored_value(value: ir.Value | None) -> ir.Value | None:
    """The float32 initializer that a value is, which exporters may copy; None: it is computed, or can be given."""
    value = original(value)
    if value is None or not value.is_initializer() or value.is_graph_input() or value.const_value is None:
        return None
    return value if value.dtype is ir.DataType.FLOAT else None


def _layer_before(node: ir.Node) -> ir.Node | None:
    """The layer that a batch normalization can be folded into."""
    source = node.inputs[0]
    layer = None if source is None else source.producer()
    if source is None or layer is None or layer.domain != "" or layer.op_type not in ("Conv", "Gemm"):
        return None
    weight = layer.inputs[1]
    if weight is None or stored_value(weight) is not weight or len(weight.uses()) != 1:
        return None
    is_read = len(source.uses()) > 1 or source.is_graph_output()
    is_read |= any(value.uses() or value.is_graph_output() for value in node.outputs[1:])
    bias = layer.inputs[2] if len(layer.inputs) > 2 else None
    is_plain = bias is None or (stored_value(bias) is not None and _array(bias).size in (1, _channels(layer)))
    beta = layer.attributes.get("beta")
    if is_read or not is_plain or (bias is not None and beta is not None and beta.as_float() != 1):
        return None
    return layer if all(stored_value(value) is not None for value in node.inputs[1:5]) else None


def _fold(writer: NodeWriter, layer: ir.Node, node: ir.Node) -> None:
    scale, shift, mean, variance = (_array(value) for value in node.inputs[1:5])
    epsilon = node.attributes.get("epsilon")
    factor = scale / np.sqrt(variance + (1e-5 if epsilon is None else epsilon.as_float()))
    weight = layer.inputs[1]
    assert weight is not None
    numbers = _array(weight)
    axis = _channel_axis(layer)
    weight.const_value = _tensor(numbers * factor.reshape([-1 if one == axis else 1 for one in range(numbers.ndim)]))
    given = layer.inputs[2] if len(layer.inputs) > 2 else None
    before = np.zeros(1) if given is None else _array(given).reshape(-1)
    read = [*node.inputs[1:5], given]
    name = str((given or read[1]).name)  # type: ignore[union-attr]
    array = (shift + (before - mean) * factor).astype(np.float32)
    own, output = layer.outputs[0], node.outputs[0]
    output.replace_all_uses_with(own, replace_graph_outputs=True)
    writer.graph.remove(node, safe=True)
    own.name, output.name = str(output.name), f"{output.name}_before_folding"
    layer.resize_inputs(3)
    layer.replace_input_with(2, None)
    for value in read:
        remove_unread(writer.graph, value)
    layer.replace_input_with(2, writer.constant(array, name, np.float32))


def _array(value: ir.Value | None) -> np.ndarray:
    stored = stored_value(value)
    assert stored is not None
    assert stored.const_value is not None
    return np.asarray(stored.const_value.numpy()).astype(np.float64)


def _tensor(array: np.ndarray) -> ir.TensorProtocol:
    return ir.Tensor(array.astype(np.float32))


def _channel_axis(layer: ir.Node) -> int:
    return 0 if layer.op_type == "Conv" or integer(layer, "transB", 0) else 1


def _channels(layer: ir.Node) -> int:
    return int(_array(layer.inputs[1]).shape[_channel_axis(layer)])
