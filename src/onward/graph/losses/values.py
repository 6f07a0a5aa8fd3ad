"""The ends of a loss: the prediction it starts from, the labels that become inputs, the values that become outputs."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.nodes.node_writer import NodeWriter
from onward.graph.nodes.shape_inference import inferred_values
from onward.losses.classes import describe_shape

INTEGER_TYPES = frozenset(
    {
        ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32, ir.DataType.INT64,
        ir.DataType.UINT8, ir.DataType.UINT16, ir.DataType.UINT32, ir.DataType.UINT64,
    }
)  # fmt: skip
FLOAT_TYPES = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
SMALLEST = float(np.finfo(np.float32).tiny)
"""Smallest normal float32: its inverse is finite, so that the gradient of its logarithm is no infinity."""

Dimension = int | ir.SymbolicDim | None


def computing_type(value: ir.Value) -> ir.DataType:
    """The type a loss is computed in: float32, or float64 for float64 predictions."""
    return ir.DataType.DOUBLE if value.dtype is ir.DataType.DOUBLE else ir.DataType.FLOAT


def to_computing_type(writer: NodeWriter, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """The value cast to `dtype`; integers only where they are of another type.

    A float is cast even if the model says that it has the type: in mixed precision it is computed in 16 bits.
    """
    if value.dtype is dtype and dtype not in FLOAT_TYPES:
        return value
    cast = writer.cast(value, dtype)
    cast.dtype = dtype
    cast.shape = value.shape
    return cast


def clip_to_positive(writer: NodeWriter, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """At least the smallest normal float32, whose inverse is finite: its logarithm has a gradient."""
    if writer.opset < 11:
        return writer.apply("Clip", value, min=SMALLEST)
    return writer.apply("Clip", value, writer.constant(SMALLEST, "smallest", dtype.numpy()))


def find_prediction(writer: NodeWriter, name: str, field: str, rank: int | None = None) -> ir.Value:
    """The value of the model that a loss is made of, its type and shape inferred where the model leaves them out.

    That is an output, or what a node of the main graph computes. Of a `ZipMap` it is the tensor that it makes a map of.

    Raises:
        ModelError: there is no such value, it is no float tensor, or it has another rank.
    """
    graph = writer.graph
    value = next((output for output in graph.outputs if output.name == name), None)
    if value is None:
        value = next((one for node in graph for one in node.outputs if one.name == name), None)
    if value is None:
        outputs = [str(output.name) for output in graph.outputs]
        names = [*outputs, *(str(one.name) for node in graph for one in node.outputs)]
        near = difflib.get_close_matches(name, outputs, n=1, cutoff=0.4) or difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ModelError(
            f"loss.{field} is {name!r}, which is no output of the model, nor another value in it; its outputs "
            f"are {', '.join(outputs)}{hint}"
        )
    node = value.producer()
    if node is not None and node.op_type == "ZipMap" and node.inputs[0] is not None:
        value = node.inputs[0]
    if value.dtype is None or value.shape is None:
        infer_type_and_shape(writer.model, value)
    if value.dtype is not None and value.dtype not in FLOAT_TYPES:
        what = "output" if value.is_graph_output() else "value"
        raise ModelError(f"loss.{field}: {what} {name!r} is {value.dtype.name.lower()}; expected a float tensor.")
    if rank is not None and value.shape is not None and len(value.shape) != rank:
        raise ModelError(f"loss.{field}: output {name!r} is {describe_shape(value)}; expected {rank} axes.")
    return value


def infer_type_and_shape(model: ir.Model, value: ir.Value) -> None:
    """Fills in type and shape of one value by ONNX's shape inference."""
    inferred = inferred_values(model).get(str(value.name))
    if inferred is None:
        return
    if value.shape is None:
        value.shape = inferred.shape
    if value.dtype is None and inferred.dtype is not None:
        value.dtype = inferred.dtype


def add_label(
    writer: NodeWriter,
    name: str,
    dtype: ir.DataType,
    shape: Iterable[Dimension] | None,
    allowed: Collection[ir.DataType] | None = None,
) -> ir.Value:
    """A label as an input of the graph: the one the graph has under this name, or a new one.

    Args:
        writer: writes the loss.
        name: of the label.
        dtype: of a new input; an existing one must be of the same kind (integer or float), or in `allowed`.
        shape: what the loss compares with; None: unknown.
        allowed: element types that an existing input may have.

    Raises:
        ModelError: an output or initializer of the model has this name, or the existing input has another type or
            rank.
    """
    graph = writer.graph
    dimensions = None if shape is None else list(shape)
    existing = next((value for value in graph.inputs if value.name == name), None)
    if existing is not None and not existing.is_initializer():
        _check_existing(existing, dtype, dimensions, allowed)
        return existing
    inner = next((one for node in graph for one in node.outputs if one.name == name), None)
    if inner is not None and not inner.is_graph_output():
        inner.name = writer.unique(f"{name}_of_model")  # as skl2onnx calls a value inside; export writes another graph
    elif not writer.is_free(name):
        raise ModelError(
            f"loss label {name!r} is the name of {_kind_of(graph, name)} of the model already; "
            "labels become inputs of the graph, so give the feature another name (data.input_name_map)."
        )
    else:
        writer.unique(name)
    value = ir.Value(
        name=name,
        type=ir.TensorType(dtype),
        shape=None if dimensions is None else ir.Shape(dimensions),
    )
    graph.inputs.append(value)
    return value


def _check_existing(
    value: ir.Value, dtype: ir.DataType, shape: list[Dimension] | None, allowed: Collection[ir.DataType] | None
) -> None:
    if allowed is None:
        allowed = INTEGER_TYPES if dtype in INTEGER_TYPES else FLOAT_TYPES
    if value.dtype is not None and value.dtype not in allowed:
        hint = ""
        if dtype in INTEGER_TYPES:
            hint = " Class labels are integers; for probabilities in the prediction's shape set loss.dense_labels."
        expected = dtype.name.lower()
        raise ModelError(
            f"loss label {value.name!r} is an input of type {value.dtype.name.lower()}; expected {expected}.{hint}"
        )
    if shape is None or value.shape is None:
        return
    wanted = describe_shape(ir.Value(name="wanted", shape=ir.Shape(shape)))
    message = f"loss label {value.name!r} is an input of shape {describe_shape(value)}; the prediction needs {wanted}."
    if len(value.shape) != len(shape):
        raise ModelError(message)
    for left, right in zip(value.shape, shape, strict=True):
        if isinstance(left, int) and isinstance(right, int) and left != right:
            raise ModelError(message)


def _kind_of(graph: ir.Graph, name: str) -> str:
    if name in graph.initializers:
        return "an initializer"
    if any(output.name == name for output in graph.outputs):
        return "an output"
    return "a value"


def publish(writer: NodeWriter, value: ir.Value, name: str, dtype: ir.DataType | None = None) -> str:
    """Makes a value an output of the graph and returns its name.

    `dtype` is what a rank-0 value was computed in, float64 becoming float32; None leaves type and shape as they are.
    """
    if dtype is ir.DataType.DOUBLE:
        value = writer.cast(value, ir.DataType.FLOAT)
        dtype = ir.DataType.FLOAT
    if value.name != name:
        value.name = writer.unique(name if writer.is_free(name) else f"{writer.prefix}{name}")
    if dtype is not None:
        value.type = ir.TensorType(dtype)
        value.shape = ir.Shape([])
    writer.graph.outputs.append(value)
    return str(value.name)
