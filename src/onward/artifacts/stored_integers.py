"""Weights of quantization-aware training as the integers that they were rounded to, in the exported model."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onward.graph.quantize_aware.quantizers import Quantizer, quantizing_nodes


def store_integers(model: ir.Model, quantizers: Sequence[Quantizer]) -> None:
    """Replaces each weight and the node that quantizes it by the integers that it gives, in place.

    They are computed when they are written, in float32 like in training, and equal ONNX Runtime's own.
    """
    graph, nodes = model.graph, quantizing_nodes(model.graph)
    for quantizer in quantizers:
        node = nodes.get(quantizer.value)
        if not quantizer.is_weight or node is None:
            continue
        weight, scale, zero = node.inputs[:3]
        assert weight is not None
        assert scale is not None
        assert zero is not None
        stored, name = weight.const_value, str(node.outputs[0].name)
        assert stored is not None
        assert zero.dtype is not None
        lazy = ir.LazyTensor(
            functools.partial(_integers, weight, scale, zero, quantizer.axis, name),
            dtype=zero.dtype, shape=ir.Shape(stored.shape.numpy()), name=name,
        )  # fmt: skip
        integers = ir.Value(name=name, shape=lazy.shape, type=ir.TensorType(zero.dtype), const_value=lazy)
        node.outputs[0].replace_all_uses_with(integers)
        node.outputs[0].name = f"{name}_replaced"
        graph.remove(node, safe=True)
        graph.register_initializer(integers)
        if not weight.uses():
            graph.initializers.pop(str(weight.name))
    if quantizers:
        _store_biases(graph)


def _store_biases(graph: ir.Graph) -> None:
    """Integer kernels add biases of 32 bits, whose scale is the product of those of what is multiplied."""
    for node in [one for one in graph if one.op_type in ("Conv", "Gemm") and one.domain == ""]:
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        factors = [None if value is None else value.producer() for value in node.inputs[:2]]
        beta = node.attributes.get("beta")
        if bias is None or bias.const_value is None or len(bias.uses()) > 1 or len(bias.const_value.shape) != 1:
            continue
        if any(one is None or one.op_type != "DequantizeLinear" for one in factors) or (beta and beta.as_float() != 1):
            continue
        scales = [one.inputs[1] for one in factors if one is not None and one.inputs[1] is not None]
        if any(scale.const_value is None for scale in scales):
            continue
        _store_bias(graph, node, bias, scales)


def _store_bias(graph: ir.Graph, node: ir.Node, bias: ir.Value, scales: Sequence[ir.Value]) -> None:
    name, floats = str(bias.name), bias.const_value
    assert floats is not None
    shape = max((scale.const_value.shape.numpy() for scale in scales if scale.const_value), key=len)
    sizes = np.broadcast_shapes(floats.shape.numpy(), shape)  # a Gemm's bias may be one number for all channels

    def product() -> np.ndarray:
        return np.asarray(_array(scales[0]) * _array(scales[1]), np.float32)

    def integers() -> ir.TensorProtocol:
        limit = np.iinfo(np.int32).max
        rounded = np.rint(np.asarray(floats.numpy()).astype(np.float64) / product())
        return ir.Tensor(np.clip(rounded, -limit, limit).astype(np.int32), name=f"{name}_quantized")

    made = {
        f"{name}_quantized": (ir.DataType.INT32, sizes, integers),
        f"{name}_scale": (ir.DataType.FLOAT, shape, lambda: ir.Tensor(product(), name=f"{name}_scale")),
    }
    values = []
    for own, (dtype, own_sizes, make) in made.items():
        lazy = ir.LazyTensor(make, dtype=dtype, shape=ir.Shape(own_sizes), name=own)
        values.append(ir.Value(name=own, shape=lazy.shape, type=ir.TensorType(dtype), const_value=lazy))
        graph.register_initializer(values[-1])
    output = ir.Value(name=f"{name}_dequantized", shape=ir.Shape(sizes), type=ir.TensorType(ir.DataType.FLOAT))
    axis = [ir.AttrInt64("axis", 0)] if shape else []
    graph.insert_before(
        node, ir.Node("", "DequantizeLinear", values, axis, outputs=[output], name=f"{name}/Dequantize")
    )
    node.replace_input_with(2, output)
    graph.initializers.pop(name)


def _integers(weight: ir.Value, scale: ir.Value, zero: ir.Value, axis: int | None, name: str) -> ir.TensorProtocol:
    numbers, factors, shift = (_array(value) for value in (weight, scale, zero))
    kind = shift.dtype
    if axis is not None:
        shape = [-1 if one == axis else 1 for one in range(numbers.ndim)]
        factors, shift = factors.reshape(shape), shift.reshape(shape)
    limits = ir.DataType.from_numpy(kind)
    low, high = {ir.DataType.INT4: (-8, 7), ir.DataType.UINT8: (0, 255)}.get(limits, (-128, 127))
    rounded = np.rint((numbers / factors).astype(np.float32)) + shift.astype(np.float32)
    return ir.Tensor(np.clip(rounded, low, high).astype(kind), dtype=limits, name=name)


def _array(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return np.asarray(value.const_value.numpy())
