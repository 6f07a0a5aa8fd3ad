"""SqueezeNet 1.1 (Iandola et al., 2016; the 1.1 of its release) as an ONNX graph, also for small images.

Weights have the dotted names of torchvision's model (`features.3.squeeze.weight`).
Shapes: B batch, C channels, N image size.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onward.models.graph_writer import GraphWriter, constant, normal
from onward.models.layers import batch_norm, convolution, dropout
from onward.models.reference_model import ModelOptions, option

STEM_CHANNELS = 64
STAGES: tuple[tuple[tuple[int, int, int], ...], ...] = (
    ((3, 16, 64), (4, 16, 64)),
    ((6, 32, 128), (7, 32, 128)),
    ((9, 48, 192), (10, 48, 192), (11, 64, 256), (12, 64, 256)),
)
"""After each of the three poolings: the fire modules (place in torchvision's `features`, squeezed channels,
channels of each expansion)."""

SMALLEST_MAP = 4
"""A halving that would leave fewer rows than this is left out."""


@dataclass(frozen=True, kw_only=True)
class SqueezeNetOptions(ModelOptions):
    """Options of `squeezenet`."""

    classes: int = option(1000, "number of classes", minimum=1)
    image_size: int = option(224, "rows and columns of an image", minimum=1)
    channels: int = option(3, "channels of an image", minimum=1)
    dropout: float = option(0.5, "dropout ratio before the classifier", minimum=0, below=1)
    batch_norm: bool = option(
        False, "batch normalization after every convolution but the last, without the classifier's ReLU: trains faster"
    )


def build_squeezenet(options: SqueezeNetOptions) -> ir.Model:
    """Writes SqueezeNet 1.1.

    Input: `images` float32 [batch, channels, size, size]. Output: `logits` float32 [batch, classes].

    The network halves its maps four times: in the first convolution and in three poolings. For small images the
    halvings that would leave a map of fewer than 4 rows are left out: the first convolution then has stride 1 and
    padding 1, a pooling falls away. From 65 pixels on all four are kept; 32 pixels keep
    the first convolution's and one pooling, 8 pixels one pooling.

    With `batch_norm`, convolutions lose their bias to a BatchNormalization node, and the classifier its last ReLU.
    """
    size = options.image_size
    writer = GraphWriter("squeezenet", options.opset, options.seed)
    images = writer.input("images", ir.DataType.FLOAT, ["batch", options.channels, size, size])
    halved = (size - 3) // 2 + 1
    stride, padding = (2, 0) if halved >= SMALLEST_MAP else (1, 1)
    size = halved if stride == 2 else size
    x = _activated(writer, images, "features.0", (options.channels, STEM_CHANNELS), 3, stride, padding, options)
    channels = STEM_CHANNELS
    for stage in STAGES:
        pooled = -(-(size - 3) // 2) + 1
        if pooled >= SMALLEST_MAP:
            x = writer.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)
            size = pooled
        for place, squeezed, expanded in stage:
            with writer.scope(f"features.{place}"):
                x = _fire(writer, x, (channels, squeezed, expanded), options)
            channels = 2 * expanded
    x = dropout(writer, x, options.dropout)
    with writer.scope("classifier.1"):
        weight = writer.weight("weight", (options.classes, channels, 1, 1), normal(0.01))
        x = writer.op("Conv", x, weight, writer.weight("bias", (options.classes,), constant(0.0)), kernel_shape=[1, 1])
    if not options.batch_norm:
        x = writer.op("Relu", x)
    logits = writer.op("Flatten", writer.op("GlobalAveragePool", x), axis=1, name="logits")
    return writer.finish([(logits, ["batch", options.classes])])


def _fire(writer: GraphWriter, x: ir.Value, channels: tuple[int, int, int], options: SqueezeNetOptions) -> ir.Value:
    """Squeeze by a 1×1 convolution, expand by a 1×1 and a 3×3 one side by side."""
    inputs, squeezed, expanded = channels
    x = _activated(writer, x, "squeeze", (inputs, squeezed), 1, 1, 0, options)
    near = _activated(writer, x, "expand1x1", (squeezed, expanded), 1, 1, 0, options)
    wide = _activated(writer, x, "expand3x3", (squeezed, expanded), 3, 1, 1, options)
    return writer.op("Concat", near, wide, axis=1)


def _activated(
    writer: GraphWriter,
    x: ir.Value,
    name: str,
    channels: tuple[int, int],
    kernel: int,
    stride: int,
    padding: int,
    options: SqueezeNetOptions,
) -> ir.Value:
    x = convolution(writer, x, name, channels, kernel, stride, padding, bias=not options.batch_norm)
    if options.batch_norm:
        x = batch_norm(writer, x, f"{name}.bn", channels[1])
    return writer.op("Relu", x)
