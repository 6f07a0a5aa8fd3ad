"""The stored tensors of an ONNX model or file, as arrays by name."""

from __future__ import annotations

from os import PathLike

import numpy as np
import onnx


def stored_arrays(model: onnx.ModelProto | str | PathLike[str]) -> dict[str, np.ndarray]:
    proto = model if isinstance(model, onnx.ModelProto) else onnx.load(model)
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
