"""What `onward inspect` says: the facts as values, and the text they become."""

from __future__ import annotations

from onward.graph.inspection.facts import inspect
from tests.graph.inspection.models import inspected_model, why_not


def test_facts():
    found = inspect(inspected_model(), why_not)
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


def test_a_domain_that_is_not_imported():
    model = inspected_model()
    del model.opset_import[1]
    (obstacle,) = inspect(model).obstacles
    assert obstacle.obstacle == "the model imports no version of the domain 'com.acme'"
