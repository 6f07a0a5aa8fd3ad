"""Models that are inspected."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper, parser


def inspected_model() -> onnx.ModelProto:
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17, "com.acme" : 3], producer_name: "acme", producer_version: "1.2">
        net (float[batch, 3, 8, 8] image) => (float[batch, 10] logits, float[batch, 16] features)
        <float factor = {0.5}>
        {
            c = Conv(image, kernel, shift)
            n = BatchNormalization(c, one, zero, mean, variance)
            p = GlobalAveragePool(n)
            f = Flatten(p)
            s = Mul(f, factor)
            features = com.acme.Squash(s)
            logits = Gemm(features, head, head_bias)
        }"""
    )
    rng = np.random.default_rng(0)
    shapes = {"kernel": (16, 3, 3, 3), "shift": (16,), "mean": (16,), "variance": (16,), "head": (16, 10)}
    for name, shape in shapes.items():
        model.graph.initializer.append(numpy_helper.from_array(rng.uniform(size=shape).astype(np.float32), name))
    for name, fill, count in (("one", 1.0, 16), ("zero", 0.0, 16), ("head_bias", 0.0, 10)):
        model.graph.initializer.append(numpy_helper.from_array(np.full(count, fill, np.float32), name))
    for index, node in enumerate(model.graph.node):
        node.name = f"node_{index}"
    return model


def why_not(domain: str, op_type: str, version: int) -> str | None:
    return f"no lowering of version {version}" if domain == "com.acme" else None
