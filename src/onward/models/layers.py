"""Layers that several reference models are made of, written with the operators that an opset has.

Shapes: B batch, S sequence, H heads, E width of one head, W = H·E width of the model.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onward.models.graph_writer import Fill, GraphWriter, constant, uniform

LAYER_NORMALIZATION_SINCE = 17
GELU_SINCE = 20

MASKED_SCORE = -10000.0
"""What replaces or lowers a masked attention score. exp() of it is 0 in float32, and unlike -inf it is a number
of every floating type: a row that is masked throughout stays finite, and calibration for int8 sees a finite range."""


def he_uniform(inputs: int) -> Fill:
    """Uniform of variance 2 / inputs, for layers before a ReLU (He et al., 2015)."""
    return uniform(math.sqrt(6.0 / inputs))


def linear(writer: GraphWriter, x: ir.Value, name: str, inputs: int, outputs: int, fill: Fill) -> ir.Value:
    """`x @ weight + bias`; weight [inputs, outputs] (the transpose of torch.nn.Linear's), bias 0."""
    with writer.scope(name):
        weight = writer.weight("weight", (inputs, outputs), fill)
        bias = writer.weight("bias", (outputs,), constant(0.0))
        return writer.op("Add", writer.op("MatMul", x, weight), bias)


def layer_norm(writer: GraphWriter, x: ir.Value, name: str, width: int, epsilon: float) -> ir.Value:
    """Layer normalization over the last axis (ONNX LayerNormalization; before opset 17 its primitives)."""
    with writer.scope(name):
        weight = writer.weight("weight", (width,), constant(1.0))
        bias = writer.weight("bias", (width,), constant(0.0))
        if writer.opset >= LAYER_NORMALIZATION_SINCE:
            return writer.op("LayerNormalization", x, weight, bias, axis=-1, epsilon=epsilon)
        # ReduceMean takes its axes as an attribute in all opsets before 18.
        centred = writer.op("Sub", x, writer.op("ReduceMean", x, axes=[-1]))
        variance = writer.op("ReduceMean", writer.op("Mul", centred, centred), axes=[-1])
        deviation = writer.op("Sqrt", writer.op("Add", variance, writer.number(epsilon)))
        return writer.op("Add", writer.op("Mul", writer.op("Div", centred, deviation), weight), bias)


def gelu(writer: GraphWriter, x: ir.Value) -> ir.Value:
    """x·Φ(x), by the error function (Hendrycks and Gimpel, 2016)."""
    with writer.scope("gelu"):
        if writer.opset >= GELU_SINCE:
            return writer.op("Gelu", x, approximate="none")
        scaled = writer.op("Erf", writer.op("Div", x, writer.number(math.sqrt(2.0))))
        doubled = writer.op("Mul", x, writer.op("Add", scaled, writer.number(1.0)))
        return writer.op("Mul", doubled, writer.number(0.5))


def gelu_tanh(writer: GraphWriter, x: ir.Value) -> ir.Value:
    """GELU by its tanh approximation, as GPT-2 was trained: x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³)))."""
    with writer.scope("gelu"):
        if writer.opset >= GELU_SINCE:
            return writer.op("Gelu", x, approximate="tanh")
        cubed = writer.op("Mul", writer.op("Pow", x, writer.number(3.0)), writer.number(0.044715))
        inner = writer.op("Mul", writer.op("Add", x, cubed), writer.number(math.sqrt(2.0 / math.pi)))
        gate = writer.op("Add", writer.op("Tanh", inner), writer.number(1.0))
        return writer.op("Mul", writer.op("Mul", x, writer.number(0.5)), gate)


def dropout(writer: GraphWriter, x: ir.Value, ratio: float) -> ir.Value:
    """A Dropout node, an identity until training turns it on; nothing for the ratio 0."""
    return x if ratio == 0 else writer.op("Dropout", x, writer.number(ratio))


def count_positions(writer: GraphWriter, token_ids: ir.Value) -> ir.Value:
    """0, 1, ..., S-1 for token ids [B, S]."""
    with writer.scope("positions"):
        length = writer.op("Gather", writer.op("Shape", token_ids), writer.integers(1), axis=0)
        positions = writer.op("Range", writer.integers(0), length, writer.integers(1))
        return writer.declare(positions, ir.DataType.INT64, ["sequence"])


def split_heads(writer: GraphWriter, x: ir.Value, head_width: int) -> ir.Value:
    """[B, S, W] -> [B, H, S, E]. The shape leaves H open, so that a slice of the heads goes through as well."""
    parts = writer.op("Reshape", x, writer.integers([0, 0, -1, head_width]))
    return writer.op("Transpose", parts, perm=[0, 2, 1, 3])


def merge_heads(writer: GraphWriter, x: ir.Value) -> ir.Value:
    """[B, H, S, E] -> [B, S, W]."""
    return writer.op("Reshape", writer.op("Transpose", x, perm=[0, 2, 1, 3]), writer.integers([0, 0, -1]))


def attention_scores(writer: GraphWriter, query: ir.Value, key: ir.Value, head_width: int) -> ir.Value:
    """query·keyᵀ / √E: [B, H, S, E] twice -> [B, H, S, S]."""
    product = writer.op("MatMul", query, writer.op("Transpose", key, perm=[0, 1, 3, 2]))
    return writer.op("Mul", product, writer.number(1.0 / math.sqrt(head_width)))


def attend(writer: GraphWriter, scores: ir.Value, value: ir.Value, ratio: float) -> ir.Value:
    """dropout(softmax(scores))·value: [B, H, S, S] and [B, H, S, E] -> [B, H, S, E]."""
    weights = dropout(writer, writer.op("Softmax", scores, axis=-1), ratio)
    return writer.op("MatMul", weights, value)


def convolution(
    writer: GraphWriter,
    x: ir.Value,
    name: str,
    channels: tuple[int, int],
    kernel: int,
    stride: int = 1,
    padding: int = 0,
    bias: bool = True,
) -> ir.Value:
    """A square convolution from and to so many channels; weight [outputs, inputs, kernel, kernel], He-uniform."""
    inputs, outputs = channels
    with writer.scope(name):
        weight = writer.weight("weight", (outputs, inputs, kernel, kernel), he_uniform(inputs * kernel * kernel))
        operands = [x, weight, writer.weight("bias", (outputs,), constant(0.0))] if bias else [x, weight]
        pads = [padding] * 4
        return writer.op("Conv", *operands, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=pads)


def batch_norm(writer: GraphWriter, x: ir.Value, name: str, channels: int) -> ir.Value:
    """Batch normalization over axis 1 by its running statistics; training uses and updates them by batch."""
    with writer.scope(name):
        weight = writer.weight("weight", (channels,), constant(1.0))
        bias = writer.weight("bias", (channels,), constant(0.0))
        mean = writer.weight("running_mean", (channels,), constant(0.0))
        variance = writer.weight("running_var", (channels,), constant(1.0))
        return writer.op("BatchNormalization", x, weight, bias, mean, variance, epsilon=1e-5, momentum=0.9)


def dense(writer: GraphWriter, x: ir.Value, name: str, inputs: int, outputs: int) -> ir.Value:
    """`x @ weightᵀ + bias` of a matrix [B, inputs]; weight [outputs, inputs] as torch.nn.Linear has it, He-uniform."""
    with writer.scope(name):
        weight = writer.weight("weight", (outputs, inputs), he_uniform(inputs))
        bias = writer.weight("bias", (outputs,), constant(0.0))
        return writer.op("Gemm", x, weight, bias, transB=1)
