"""A model of fp16 or bf16 made one of fp32, in place: the same graph with every 16-bit float type replaced."""

from __future__ import annotations

import copy

import onnx_ir as ir

from onward.graph.reading.tensor_storage import close_file

NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
WIDE = ir.DataType.FLOAT

_TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_datatype", "output_dtype", "stash_type", "softmax_precision"})
"""Attributes of operators that hold an element type as a number."""


def widen_to_float32(model: ir.Model) -> None:
    """Replaces 16-bit floats by float32 in stored tensors, types of values, casts and other nodes that name a type."""
    for graph in (*model.graphs(), *(function.graph for function in model.functions.values())):
        for value in (*graph.inputs, *graph.initializers.values()):
            _widen_value(value)
        for node in graph:
            for value in node.outputs:
                _widen_value(value)
            for name, attribute in list(node.attributes.items()):
                widened = _widened(name, attribute)
                if widened is not None:
                    node.attributes[name] = widened


def _widen_value(value: ir.Value) -> None:
    if value.type is not None and value.type.dtype in NARROW:
        value.type = copy.deepcopy(value.type)  # which the graph that this one was cloned from may share
        value.type.dtype = WIDE
    if value.const_value is not None and value.const_value.dtype in NARROW:
        value.const_value = _lazily_widened(value.const_value)


def _widened(name: str, attribute: ir.Attr) -> ir.Attr | None:
    if attribute.is_ref():
        return None
    if attribute.type is ir.AttributeType.INT and name in _TYPE_ATTRIBUTES and attribute.as_int() in NARROW:
        return ir.AttrInt64(name, WIDE)
    if attribute.type is ir.AttributeType.TENSOR and attribute.as_tensor().dtype in NARROW:
        return ir.AttrTensor(name, _lazily_widened(attribute.as_tensor()))
    return None


def _lazily_widened(tensor: ir.TensorProtocol) -> ir.LazyTensor:
    def widen() -> ir.TensorProtocol:
        wide = ir.Tensor(tensor.numpy().astype(WIDE.numpy()), name=tensor.name)
        close_file(tensor)
        return wide

    return ir.LazyTensor(widen, dtype=WIDE, shape=ir.Shape(tensor.shape.numpy()), name=tensor.name)
