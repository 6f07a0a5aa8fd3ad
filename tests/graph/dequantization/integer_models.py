"""Small networks of integers."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper


def integer_model(channels_last: bool = False) -> onnx.ModelProto:
    """A convolution per channel with a bias, quantized; its weight is `kernel_quantized`."""
    generator = np.random.default_rng(1)
    tensors: dict[str, np.ndarray] = {
        "s": np.array(0.05, np.float32), "z": np.array(120, np.uint8),
        "kernel_quantized": generator.integers(-127, 127, (3, 2, 3, 3)).astype(np.int8),
        "ws": np.array([0.01, 0.02, 0.03], np.float32), "wz": np.zeros(3, np.int8),
        "bias_quantized": generator.integers(-500, 500, 3).astype(np.int32),
        "ys": np.array(0.2, np.float32),
    }  # fmt: skip
    call = "QLinearConv (q, s, z, kernel_quantized, ws, wz, ys, z, bias_quantized)"
    call = f"com.microsoft.QLinearConv <channels_last = 1> {call[11:]}" if channels_last else call
    shapes = ("1, 6, 6, 2", "1, 4, 4, 3") if channels_last else ("1, 2, 6, 6", "1, 3, 4, 4")
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> net
        (float[{shapes[0]}] x) => (float[{shapes[1]}] y) {{ [first] q = QuantizeLinear (x, s, z)
           [conv] p = {call}
           [last] y = DequantizeLinear (p, ys, z) }}"""
    )
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in tensors.items())
    return model
