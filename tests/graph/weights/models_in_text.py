"""Models in ONNX's text form, and tensors for them."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper, parser

RNG = np.random.default_rng(0)


def model_of(text: str, producer: str = "", **tensors: np.ndarray) -> onnx.ModelProto:
    """`a__b` stands for the name `a.b`, which the text form cannot hold."""
    model = parser.parse_model('<ir_version: 8, opset_import: ["" : 17]> g ' + text)
    for node in model.graph.node:
        node.input[:] = [name.replace("__", ".") for name in node.input]
    for name, array in tensors.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name.replace("__", ".")))
    model.producer_name = producer
    return model


def normal(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.normal(size=shape).astype(dtype)


def hann(length: int) -> np.ndarray:
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / length)


def two_layers() -> onnx.ModelProto:
    return model_of(
        """(float[N, 4] x) => (float[N, 2] y)
        { a = Gemm(x, first__weight, first__bias) b = Relu(a) c = Mul(b, half)
          y = Gemm(c, second__weight, second__bias) }""",
        first__weight=normal(4, 3), first__bias=normal(3), half=np.array(0.5, np.float32),
        second__weight=normal(3, 2), second__bias=normal(2),
    )  # fmt: skip
