"""Stored integers as trainable weights, and rounding taken out where it is not wanted.

A stored tensor that is only dequantized becomes a float32 initializer, quantized by the model itself with the scale it
had: the numbers computed are the same, and training moves them (quantization-aware training).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from onward.graph.dequantization.operators import real_name
from onward.graph.dequantization.writing import RealWriter, stored
from onward.graph.weights.quantization import is_only_dequantized

_QUANTIZABLE = {
    ir.DataType.UINT8: 10, ir.DataType.INT8: 10, ir.DataType.UINT16: 21, ir.DataType.INT16: 21,
    ir.DataType.UINT4: 21, ir.DataType.INT4: 21,
}  # fmt: skip
"""Integer type -> the opset from which on `QuantizeLinear` gives it."""


def restore_weights(writer: RealWriter, keep_rounding: bool) -> int:
    """Makes float initializers of stored integers that are only dequantized, in place; returns how many elements."""
    count = 0
    for value in list(writer.graph.initializers.values()):
        tensor = value.const_value
        if tensor is None or not tensor.dtype.is_integer() or not _is_dequantized(value):
            continue
        ends = list(_dequantizations(value))
        scale, zero = _same_parameters(ends)
        direct = all(use.node.op_type == "DequantizeLinear" for use in value.uses())
        numbers = None if scale is None else _real(value, ends[0], scale, zero)
        if numbers is None or scale is None or not (direct or scale.size == 1):
            continue
        weight = writer.store(numbers, real_name(str(value.name)))
        count += numbers.size
        if keep_rounding and _can_quantize(writer, value, ends[0], scale):
            _quantize_again(writer, value, weight, ends[0])
        else:
            for end in ends:
                _bypass(writer, end, weight if direct else None)
            value.replace_all_uses_with(weight)
        writer.graph.initializers.pop(str(value.name))
    return count


def _is_dequantized(value: ir.Value) -> bool:
    return not value.is_graph_input() and is_only_dequantized(value) and bool(list(_dequantizations(value)))


def _dequantizations(value: ir.Value) -> Iterator[ir.Node]:
    """The nodes that give a quantized value its real numbers, operators that move elements passed over."""
    for use in value.uses():
        if use.node.op_type == "DequantizeLinear":
            yield use.node
        else:
            for output in use.node.outputs:
                yield from _dequantizations(output)


def _same_parameters(nodes: list[ir.Node]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Scale and zero point of nodes that all dequantize alike; (None, None) if they do not, or compute them."""
    found: tuple[np.ndarray, np.ndarray | None] | None = None
    for node in nodes:
        scale, zero = stored(node.inputs[1]), stored(node.inputs[2]) if len(node.inputs) > 2 else None
        if scale is None or (zero is None and len(node.inputs) > 2 and node.inputs[2] is not None):
            return None, None
        if found is not None and not (_equal(scale, found[0]) and _equal(zero, found[1])):
            return None, None
        found = (scale, zero)
    return found or (None, None)


def _equal(left: np.ndarray | None, right: np.ndarray | None) -> bool:
    return (left is None) == (right is None) and (left is None or np.array_equal(left, right))  # type: ignore[arg-type]


def _real(value: ir.Value, node: ir.Node, scale: np.ndarray, zero: np.ndarray | None) -> np.ndarray | None:
    """What stored integers stand for; None where the scale does not fit."""
    numbers = stored(value)
    assert numbers is not None
    factor = _spread(scale, numbers, node)
    shift = None if zero is None else _spread(zero, numbers, node)
    if factor is None or (zero is not None and shift is None):
        return None
    shifted = numbers.astype(np.float64) - (0 if shift is None else shift.astype(np.float64))
    return np.asarray(shifted * factor.astype(np.float64)).astype(scale.dtype)


def _spread(parameter: np.ndarray, numbers: np.ndarray, node: ir.Node) -> np.ndarray | None:
    if parameter.size == 1:
        return parameter.reshape(())
    given, blocks = node.attributes.get("axis"), node.attributes.get("block_size")
    axis = 1 if given is None else given.as_int()
    axis = 0 if numbers.ndim == 1 else axis % numbers.ndim
    if blocks is not None and blocks.as_int():
        repeated = np.repeat(parameter, blocks.as_int(), axis)
        return np.take(repeated, range(numbers.shape[axis]), axis)
    if parameter.shape != (numbers.shape[axis],):
        return None
    return parameter.reshape([-1 if one == axis else 1 for one in range(numbers.ndim)])


def _can_quantize(writer: RealWriter, value: ir.Value, node: ir.Node, scale: np.ndarray) -> bool:
    dtype = None if value.const_value is None else value.const_value.dtype
    if dtype not in _QUANTIZABLE or writer.opset < _QUANTIZABLE[dtype]:
        return False
    return scale.size == 1 or writer.opset >= 13


def _quantize_again(writer: RealWriter, value: ir.Value, weight: ir.Value, end: ir.Node) -> None:
    """The weight, quantized by the model to the integers that were stored."""
    first = next(iter(writer.graph))
    scale, zero = end.inputs[1], end.inputs[2] if len(end.inputs) > 2 else None
    if zero is None and value.dtype is not ir.DataType.UINT8:
        assert value.dtype is not None
        shape = () if scale is None or scale.shape is None else scale.shape.numpy()
        zero = writer.store(np.zeros(shape, value.dtype.numpy()), f"{weight.name}_zero_point")
    kept = [end.attributes[name] for name in ("axis", "block_size") if name in end.attributes]
    copied = [ir.Attr(one.name, one.type, one.value) for one in kept]
    (quantized,) = writer.node("QuantizeLinear", [weight, scale, zero], first, stem=str(weight.name), copied=copied)
    quantized.type = value.type
    quantized.shape = value.shape
    value.replace_all_uses_with(quantized)


def _bypass(writer: RealWriter, node: ir.Node, weight: ir.Value | None) -> None:
    """Lets what a `DequantizeLinear` reads take its place; a weight keeps its own name."""
    source = node.inputs[0] if weight is None else weight
    assert source is not None
    output = node.outputs[0]
    if output.is_graph_output():
        (copy,) = writer.node("Identity", [source], node)
        writer.replace(output, copy)
        return
    output.replace_all_uses_with(source)
    writer.graph.remove(node, safe=True)


def remove_rounding(writer: RealWriter) -> None:
    """Replaces each pair of quantizing and dequantizing by a `Clip` to the range of the quantized type, in place."""
    for node in [node for node in writer.graph if node.op_type in ("QuantizeLinear", "DynamicQuantizeLinear")]:
        quantized = node.outputs[0]
        if not is_only_dequantized(quantized) or node.inputs[0] is None:
            continue
        ends = list(_dequantizations(quantized))
        if node.op_type == "DynamicQuantizeLinear":
            value = node.inputs[0] if all(end.inputs[1] is node.outputs[1] for end in ends) else None
        else:
            value = _clipped(writer, node, ends)
        if value is None or not ends:
            continue
        _forget_types(quantized)
        for end in ends:
            _bypass_through(writer, end)
        quantized.replace_all_uses_with(value)
        if not any(output.uses() for output in node.outputs):
            writer.graph.remove(node, safe=True)


def _bypass_through(writer: RealWriter, end: ir.Node) -> None:
    _bypass(writer, end, None)


def _forget_types(value: ir.Value) -> None:
    """Types of what is moved on between quantizing and dequantizing: real numbers from now on."""
    for use in value.uses():
        if use.node.op_type != "DequantizeLinear":
            for output in use.node.outputs:
                output.dtype = ir.DataType.FLOAT
                _forget_types(output)


def _clipped(writer: RealWriter, node: ir.Node, ends: list[ir.Node]) -> ir.Value | None:
    """The value that is quantized, within the range of the quantized type; None where the two do not match."""
    scale, zero = stored(node.inputs[1]), stored(node.inputs[2]) if len(node.inputs) > 2 else None
    back, shift = _same_parameters(ends)
    if scale is None or scale.size != 1 or back is None or not _equal(scale, back):
        return None
    if not _equal(zero, shift) and (zero is not None and zero.any()) != (shift is not None and shift.any()):
        return None
    limits = np.iinfo(np.uint8 if zero is None else zero.dtype)
    middle = 0.0 if zero is None else float(zero.reshape(-1)[0])
    low, high = ((limit - middle) * float(scale.reshape(-1)[0]) for limit in (limits.min, limits.max))
    if writer.opset < 11:
        (value,) = writer.node("Clip", [node.inputs[0]], node, attributes={"min": low, "max": high})
        return value
    bounds = [writer.store(np.array(limit, scale.dtype), f"{node.name}/limit") for limit in (low, high)]
    (value,) = writer.node("Clip", [node.inputs[0], *bounds], node)
    return value
