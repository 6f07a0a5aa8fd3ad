"""What `onward inspect` says: the facts as values, and the text they become."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper, parser

from onward.graph.inspection.facts import inspect
from onward.graph.inspection.text import render


def _model() -> onnx.ModelProto:
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


def _why_not(domain: str, op_type: str, version: int) -> str | None:
    return f"no lowering of version {version}" if domain == "com.acme" else None


def test_facts():
    found = inspect(_model(), _why_not)
    assert found.name == "net"
    assert found.producer == "acme 1.2"
    assert (found.ir_version, dict(found.opsets), found.node_count) == (8, {"ai.onnx": 17, "com.acme": 3}, 7)
    assert [(t.name, t.type, t.shape) for t in found.inputs] == [("image", "float32", ("batch", 3, 8, 8))]
    assert [(t.name, t.shape) for t in found.outputs] == [("logits", ("batch", 10)), ("features", ("batch", 16))]
    assert dict(found.dimensions) == {"batch": ("image[0]",)}
    assert {weight.name for weight in found.weights if weight.trains} == {
        "kernel", "shift", "one", "zero", "head", "head_bias",
    }  # fmt: skip
    assert {weight.name: weight.frozen_because for weight in found.weights if not weight.trains} == {
        "factor": "a rank-0 constant",
        "mean": "running statistic of batch normalization",
        "variance": "running statistic of batch normalization",
    }
    kernel = next(weight for weight in found.weights if weight.name == "kernel")
    assert (kernel.count, kernel.bytes, kernel.shape) == (432, 1728, (16, 3, 3, 3))
    (obstacle,) = found.obstacles
    assert (obstacle.domain, obstacle.op_type, obstacle.version) == ("com.acme", "Squash", 3)
    assert (obstacle.nodes, obstacle.obstacle) == (("node_5",), "no lowering of version 3")
    assert [point.value for point in found.cut_points] == ["c", "features"]


def test_text():
    """The whole page, as a user sees it."""
    assert render(inspect(_model(), _why_not)).splitlines() == [
        "net",
        "  ai.onnx 17, com.acme 3; IR version 8; written by acme 1.2; 7 nodes",
        "",
        "Inputs",
        "  image  float32  [batch, 3, 8, 8]",
        "",
        "Outputs",
        "  logits    float32  [batch, 10]",
        "  features  float32  [batch, 16]",
        "",
        "Symbolic dimensions",
        "  batch  image[0]",
        "",
        "Trainable weights: 6 (650 parameters, 2.6 kB)",
        "  name       type     shape          parameters    size",
        "  kernel     float32  [16, 3, 3, 3]         432  1.7 kB",
        "  head       float32  [16, 10]              160   640 B",
        "  shift      float32  [16]                   16    64 B",
        "  one        float32  [16]                   16    64 B",
        "  zero       float32  [16]                   16    64 B",
        "  head_bias  float32  [10]                   10    40 B",
        "",
        "Tensors that are not trainable: 3",
        "     why                                       parameters   size  names",
        "  2  running statistic of batch normalization          32  128 B  mean, variance",
        "  1  a rank-0 constant                                  1    4 B  factor",
        "  training.weights_to_train overrides this by exact name",
        "",
        "Operators: 7 kinds, 7 nodes",
        "  BatchNormalization 1, Conv 1, Flatten 1, Gemm 1, GlobalAveragePool 1, Mul 1, com.acme.Squash 1",
        "",
        "Cannot be lowered, so the model cannot be trained as it is",
        "  com.acme.Squash  no lowering of version 3  node_5",
        "",
        "Cut points: 2, where one activation separates two parts",
        "  value     shape              nodes before  after  weights before",
        "  c         [batch, 16, 6, 6]             1      6               2",
        "  features  [batch, 16]                   6      1               4",
    ]


def test_long_lists_are_counted():
    text = render(inspect(_model()), largest_weights=2)
    assert "... and 4 smaller ones (232 B)" in text
    assert "Cannot be lowered" not in text


def test_a_domain_that_is_not_imported():
    model = _model()
    del model.opset_import[1]
    (obstacle,) = inspect(model).obstacles
    assert obstacle.obstacle == "the model imports no version of the domain 'com.acme'"


def test_a_model_without_weights():
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N] x) => (float[N] y) { y = Relu(x) }'
    )
    text = render(inspect(model))
    assert "Trainable weights: 0 (0 parameters, 0 B)\n  none" in text
    assert "Cut points: none" in text
