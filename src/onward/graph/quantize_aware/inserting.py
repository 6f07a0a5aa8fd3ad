"""Quantizing and dequantizing put into the user's graph, in place: at weights, at what is multiplied with them, and at
what convolutions compute, which is where ONNX Runtime looks for it to use integer kernels."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.dequantization.passes import dequantize
from onward.graph.nodes.known_values import integer, integers
from onward.graph.nodes.node_writer import NodeWriter
from onward.graph.nodes.shape_inference import inferred_values
from onward.graph.operators import Fact, operators_with
from onward.graph.quantize_aware.batch_norm_folding import fold_batch_norms
from onward.graph.quantize_aware.quantizers import NOTES, QUANTIZERS, Quantizer, quantizing_nodes
from onward.graph.reading.model_file import ModelSource, read_model
from onward.parameters.limits import Limits
from onward.parameters.quantize_aware import QuantizeAware

_MOVES = operators_with(Fact.SAME_ELEMENTS) | {"Dropout", "MaxPool"}
"""What gives out elements of its input: it is quantized as its input is, without a further error."""
_NOT_NEGATIVE = frozenset({"Abs", "Relu", "Sigmoid", "Softmax"})
_LAYERS = frozenset({"Conv", "Gemm", "MatMul"})
_SAME_WEIGHT = frozenset({"Identity", "Transpose"})
"""What exporters put between a weight and the layer that it belongs to."""
_OPSETS = {"int8": 10, "int4": 21}


def quantize_aware_model(source: ModelSource, asked: QuantizeAware, limits: Limits) -> ModelSource:
    """The user's graph with the nodes of quantization; as it is, where none is asked for.

    Raises:
        ModelError: the model cannot be read, its opset is too old, or nothing in it can be quantized.
    """
    if asked.weights is None:
        return source
    model, quantizers = _insert(read_model(source, limits), asked, limits)
    model.meta[QUANTIZERS] = quantizers
    return model


def _insert(model: ir.Model, asked: QuantizeAware, limits: Limits) -> tuple[ir.Model, tuple[Quantizer, ...]]:
    if any(node.op_type in ("QuantizeLinear", "DequantizeLinear") for node in model.graph):
        return _of_quantized(model, asked, limits)
    assert asked.weights is not None
    opset, oldest = model.opset_imports.get("", 1), max(_OPSETS[asked.weights], 13 if asked.per_channel else 10)
    if opset < oldest:
        raise ModelError(
            f"quantize_aware.weights is {asked.weights} with per_channel {str(asked.per_channel).lower()}, which needs "
            f"opset {oldest}; the model has {opset}. Convert it with onnx.version_converter, or export it again."
        )
    model.meta[NOTES] = (*fold_batch_norms(model), *_note_on_kernels(asked))
    inserter = _Inserter(model, asked)
    for node in list(model.graph):
        inserter.visit(node)
    if not inserter.found:
        raise ModelError(
            "quantize_aware.weights is set, but the model has no Conv, Gemm or MatMul with a float32 weight. Remove it."
        )
    return model, tuple(inserter.found.values())


def _note_on_kernels(asked: QuantizeAware) -> tuple[str, ...]:
    if asked.weights != "int4" or asked.activations == "none":
        return ()
    return (
        f"quantize_aware.weights is int4 and quantize_aware.activations is {asked.activations}: ONNX Runtime has no "
        "integer kernels for both, and computes such layers in float. Set activations: none for MatMulNBits.",
    )


def _of_quantized(model: ir.Model, asked: QuantizeAware, limits: Limits) -> tuple[ir.Model, tuple[Quantizer, ...]]:
    """A file that is quantized already: as float weights that are quantized with the scales they had."""
    if asked.observer != "lsq":
        raise ModelError(
            f"quantize_aware.observer is {asked.observer}, but the model is quantized already, with scales and zero "
            "points of its own; use lsq, which continues with them, or start from the float model."
        )
    model = dequantize(model, limits=limits).model
    found = {}
    for value, node in quantizing_nodes(model.graph).items():
        scale, zero = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
        if scale is None or zero is None or scale.const_value is None or zero.const_value is None:
            continue
        limit = {ir.DataType.INT8: 127, ir.DataType.INT4: 7, ir.DataType.UINT8: 255}.get(zero.const_value.dtype)
        if limit is None:
            continue
        limit -= int(np.asarray(zero.const_value.numpy()).reshape(-1)[0])
        given = node.attributes.get("axis")
        stored = node.inputs[0].const_value if node.inputs[0] is not None else None
        channels = scale.const_value.size
        found[value] = Quantizer(
            value=value, scale=str(scale.name), zero_point=str(zero.name), is_weight=stored is not None,
            axis=None if channels == 1 else 1 if given is None else given.as_int(), largest=limit, is_signed=True,
            elements=1 if stored is None else stored.size // channels, is_calibrated=True,
            observer="lsq",
        )  # fmt: skip
    return model, tuple(found.values())


class _Inserter:
    """Writes into one model.

    Attributes:
        found: value -> how it is quantized.
    """

    def __init__(self, model: ir.Model, asked: QuantizeAware) -> None:
        self.asked, self.graph, self.found = asked, model.graph, dict[str, Quantizer]()
        self._writer = NodeWriter(model, "")
        self._shapes = {name: value.shape for name, value in inferred_values(model).items()}
        self._dequantized: dict[str, ir.Value] = {}

    def visit(self, node: ir.Node) -> None:
        """Quantizes what a node reads and computes, if it is one of those with integer kernels and a weight."""
        found = _quantized_weight(node)
        if found is None:
            return
        activation, (weight, axis) = node.inputs[0], found
        self._weight(weight, axis)
        if self.asked.activations == "none":
            return
        if activation is not None:
            node.replace_input_with(0, self._activation(activation, node))
        if node.op_type == "Conv":
            self._output(node)

    def _output(self, node: ir.Node) -> None:
        value = node.outputs[0]
        uses = list(value.uses())
        if len(uses) == 1 and _is_in_range(uses[0].node) and not value.is_graph_output():
            value = uses[0].node.outputs[0]
        readers = [(use.node, use.idx) for use in value.uses() if use.node.graph is self.graph]
        if value.is_graph_output() or not readers or str(value.name) in self.found:
            return
        quantized = self._activation(value, min((one for one, _ in readers), key=list(self.graph).index))
        for reader, index in readers:
            reader.replace_input_with(index, quantized)

    def _weight(self, value: ir.Value, axis: int) -> None:
        """Quantizes a weight where layers, and what is between it and them, read it."""
        name = str(value.name)
        if name not in self._dequantized:
            assert value.const_value is not None
            numbers = np.asarray(value.const_value.numpy())
            axis %= numbers.ndim
            largest = 127 if self.asked.weights == "int8" else 7
            others = tuple(one for one in range(numbers.ndim) if one != axis) if self.asked.per_channel else None
            ranges = np.abs(numbers).max(axis=others)
            channels = ranges.size
            scale = np.where(ranges > 0, ranges / largest, 1.0).astype(np.float32)
            dtype = ir.DataType.INT8 if self.asked.weights == "int8" else ir.DataType.INT4
            own_axis = axis if self.asked.per_channel else None
            zeros = np.zeros(scale.shape, dtype.numpy())
            self._add(name, scale, zeros, own_axis, largest, numbers.size // channels)
            readers = [(use.node, use.idx) for use in value.uses() if use.node.op_type in _SAME_WEIGHT | _LAYERS]
            before = min((one for one, _ in readers), key=list(self.graph).index)
            self._dequantized[name] = self._pair(value, self.found[name], before)
            for reader, index in readers:
                reader.replace_input_with(index, self._dequantized[name])

    def _activation(self, value: ir.Value, before: ir.Node) -> ir.Value:
        node = value.producer()
        if node is not None and node.op_type == "DequantizeLinear":
            return value
        name = str(value.name)
        if name not in self._dequantized:
            source = self._source(value)
            if source in self.found:
                self._dequantized[name] = self._pair(value, self.found[source], before)
            else:
                signed, bound = _range_of(value)
                dtype = np.dtype(self.asked.activations)
                zero, largest = np.iinfo(dtype).min + (128 if signed else 0), 127 if signed else 255
                shape = self._shapes.get(name) or ()
                elements = max(prod(size for size in list(shape)[1:] if isinstance(size, int)), 1)
                self._add(name, None, np.asarray(zero, dtype), None, largest, elements, bound)
                self._dequantized[name] = self._pair(value, self.found[name], before)
        return self._dequantized[name]

    def _source(self, value: ir.Value) -> str:
        """The value that a value holds elements of, where that one is dequantized."""
        node = value.producer()
        while node is not None and node.domain == "" and node.op_type in _MOVES and node.inputs[0] is not None:
            value = node.inputs[0]
            node = value.producer()
        if node is None or node.op_type != "DequantizeLinear" or node.inputs[0] is None:
            return ""
        quantizing = node.inputs[0].producer()
        return "" if quantizing is None or quantizing.inputs[0] is None else str(quantizing.inputs[0].name)

    def _add(
        self,
        value: str,
        scale: np.ndarray | None,
        zero: np.ndarray,
        axis: int | None,
        largest: int,
        elements: int,
        bound: float | None = None,
    ) -> None:
        """Writes scale (None: of an activation, not known yet) and zero point of a value that is quantized."""
        scale_value = self._writer.constant(0.0 if scale is None else scale, f"{value}_scale", np.float32)
        zero_value = self._writer.constant(zero, f"{value}_zero_point", zero.dtype)
        self.found[value] = Quantizer(
            value=value,
            scale=str(scale_value.name),
            zero_point=str(zero_value.name),
            is_weight=scale is not None,
            axis=axis,
            largest=largest,
            is_signed=largest in (7, 127),
            elements=elements,
            is_calibrated=scale is not None,
            observer=self.asked.observer,
            largest_scale=bound,
        )

    def _pair(self, value: ir.Value, quantizer: Quantizer, before: ir.Node) -> ir.Value:
        """The value quantized and dequantized, in front of the first node that reads it."""
        scale, zero = (self.graph.initializers[name] for name in (quantizer.scale, quantizer.zero_point))
        axis = () if quantizer.axis is None else (ir.AttrInt64("axis", quantizer.axis),)
        stem, result = str(value.name), value
        for op_type, end in (("QuantizeLinear", "quantized"), ("DequantizeLinear", "dequantized")):
            output = ir.Value(name=self._writer.unique(f"{stem}_{end}"), shape=value.shape)
            output.type = zero.type if op_type == "QuantizeLinear" else value.type
            attributes = [ir.Attr(one.name, one.type, one.value) for one in axis]
            name = self._writer.unique_node_name(f"{stem}/{op_type}")
            node = ir.Node("", op_type, [result, scale, zero], attributes, outputs=[output], name=name)
            self.graph.insert_before(before, node)
            result = output
        return result


def _quantized_weight(node: ir.Node) -> tuple[ir.Value, int] | None:
    """The stored weight of a layer that is quantized, and the axis of its output channels; None: it is not."""
    if node.domain != "" or node.op_type not in _LAYERS:
        return None
    weight, axis = node.inputs[1], _channel_axis(node)
    while weight is not None and not weight.is_initializer():
        copying = weight.producer()
        if copying is None or copying.domain != "" or copying.op_type not in _SAME_WEIGHT:
            return None
        weight = copying.inputs[0]
        if copying.op_type == "Transpose":
            rank = 0 if weight is None or weight.shape is None else len(weight.shape)
            axis = (integers(copying, "perm") or tuple(reversed(range(rank))))[axis] if rank else axis
    stored = None if weight is None else weight.const_value
    if weight is None or stored is None or stored.dtype is not ir.DataType.FLOAT:
        return None
    rank = len(stored.shape)
    return (weight, axis) if rank == 2 or (rank > 2 and node.op_type == "Conv") else None


def _channel_axis(node: ir.Node) -> int:
    if node.op_type == "Conv":
        return 0
    return 0 if node.op_type == "Gemm" and integer(node, "transB", 0) else 1


def _range_of(value: ir.Value) -> tuple[bool, float | None]:
    """Whether numbers on both sides of zero are expected, and the largest scale that stays within a `Clip`.

    ONNX Runtime has integer kernels for a convolution and the `Clip` after it only where quantizing does all of that.
    """
    node = value.producer()
    while node is not None and node.domain == "" and node.op_type in (*_MOVES, "AveragePool", "GlobalAveragePool"):
        if node.inputs[0] is None:
            return True, None
        node = node.inputs[0].producer()
    if node is None or node.domain != "":
        return True, None
    low, high = _bounds(node)
    if low == 0:
        return False, None if high is None else high / 255
    if low is not None and low == -(high or 0):
        return True, -low / 128
    return node.op_type not in _NOT_NEGATIVE and not (low is not None and low > 0), None


def _is_in_range(node: ir.Node) -> bool:
    """Whether an activation after a convolution is no more than the range that its result is quantized in."""
    signed, bound = _range_of(node.outputs[0])
    return (node.domain, node.op_type) == ("", "Relu") or (node.op_type == "Clip" and (bound is not None or not signed))


def _bounds(node: ir.Node) -> tuple[float | None, float | None]:
    """Of a `Clip`, where they are stored in the graph."""
    if node.op_type != "Clip":
        return None, None
    found: list[float | None] = []
    for index, name in ((1, "min"), (2, "max")):
        given = node.inputs[index] if len(node.inputs) > index else None
        tensor = None if given is None else ir.convenience.get_const_tensor(given)
        attribute = node.attributes.get(name)
        found.append(
            float(tensor.numpy()) if tensor is not None else None if attribute is None else attribute.as_float()
        )
    return found[0], found[1]
