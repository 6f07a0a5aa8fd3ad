"""Two small networks for handwritten digits as ONNX graphs: fully connected (`gemm`) and convolutional (`conv`).

Inputs and outputs have the names that ONNX Runtime's MNIST trainer expected: `X` and `predictions`.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onward.errors import ParametersError
from onward.models.graph_writer import GraphWriter
from onward.models.layers import batch_norm, convolution, dense, dropout
from onward.models.reference_model import ModelOptions, check_options, option

FIRST_CHANNELS = 32
SECOND_CHANNELS = 64


@dataclass(frozen=True, kw_only=True)
class MnistOptions(ModelOptions):
    """Options of `mnist`."""

    variant: str = option("gemm", "fully connected or convolutional", choices=("gemm", "conv"))
    image_size: int = option(28, "rows and columns of an image", minimum=1)
    channels: int = option(1, "channels of an image", minimum=1)
    flat_input: bool = option(False, "gemm: take images as rows of pixels, [batch, channels*size*size]")
    hidden: int = option(128, "width of the hidden layer", minimum=1)
    classes: int = option(10, "number of classes", minimum=1)
    batch_norm: bool = option(True, "conv: batch normalization after every convolution")
    dropout: float = option(0.25, "conv: dropout ratio before the fully connected layers", minimum=0, below=1)

    def __post_init__(self) -> None:
        check_options(self)
        if self.variant == "conv" and self.flat_input:
            raise ParametersError("flat_input is for the variant gemm; conv needs rows and columns. Leave it out.")
        if self.variant == "conv" and self.image_size < 2:
            raise ParametersError("variant conv halves the image once; image_size must be at least 2, got 1.")


def build_mnist(options: MnistOptions) -> ir.Model:
    """Writes one of the two networks.

    Input: `X` float32 [batch, channels, size, size], or with `flat_input` [batch, channels·size·size].
    Output: `predictions` float32 [batch, classes], logits in spite of the name, as in the original.

    gemm: Gemm, ReLU, Gemm, ReLU, Gemm; the hidden layers `hidden` and `hidden` / 4 wide (128 and 32 by default).
    conv: twice (Conv 3×3, BatchNormalization, ReLU), MaxPool, Dropout, Gemm, ReLU, Dropout, Gemm.
    """
    pixels = options.channels * options.image_size**2
    writer = GraphWriter(f"mnist_{options.variant}", options.opset, options.seed)
    image: list[int | str] = [options.channels, options.image_size, options.image_size]
    images = writer.input("X", ir.DataType.FLOAT, ["batch", *([pixels] if options.flat_input else image)])
    if options.variant == "conv":
        x, features = _convolve(writer, images, options)
        x = dropout(writer, writer.op("Relu", dense(writer, x, "fc1", features, options.hidden)), options.dropout)
        scores = dense(writer, x, "fc2", options.hidden, options.classes)
    else:
        second = max(1, options.hidden // 4)
        x = images if options.flat_input else writer.op("Flatten", images, axis=1)
        x = writer.op("Relu", dense(writer, x, "fc1", pixels, options.hidden))
        x = writer.op("Relu", dense(writer, x, "fc2", options.hidden, second))
        scores = dense(writer, x, "fc3", second, options.classes)
    predictions = writer.op("Identity", scores, name="predictions")
    return writer.finish([(predictions, ["batch", options.classes])])


def _convolve(writer: GraphWriter, x: ir.Value, options: MnistOptions) -> tuple[ir.Value, int]:
    """The convolutional part; also how many features it gives for one image."""
    for name, inputs, outputs in (
        ("conv1", options.channels, FIRST_CHANNELS),
        ("conv2", FIRST_CHANNELS, SECOND_CHANNELS),
    ):
        x = convolution(writer, x, name, (inputs, outputs), 3, padding=1, bias=not options.batch_norm)
        if options.batch_norm:
            x = batch_norm(writer, x, f"{name}.bn", outputs)
        x = writer.op("Relu", x)
    x = writer.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = dropout(writer, writer.op("Flatten", x, axis=1), options.dropout)
    return x, SECOND_CHANNELS * (options.image_size // 2) ** 2
