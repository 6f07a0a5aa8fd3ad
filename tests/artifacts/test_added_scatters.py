"""Sums at indices go into what they are added to."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from onward.artifacts.added_scatters import add_into_scatters
from onward.artifacts.optimizer_graph import add_input, add_output, empty_model
from onward.graph.nodes.node_writer import NodeWriter

FLOAT = ir.DataType.FLOAT


@pytest.mark.parametrize(
    ("fill", "reduction", "rows", "count"),
    [(0.0, "add", 5, 1), (1.0, "add", 5, 0), (0.0, "max", 5, 0), (0.0, "add", 1, 0)],
    ids=["sums", "not of zeros", "largest", "broadcast"],
)
@pytest.mark.parametrize("turned", [False, True])
def test_a_sum_at_indices_is_added_in_place(fill: float, reduction: str, rows: int, count: int, turned: bool) -> None:
    model = empty_model("scatters")
    writer = NodeWriter(model, "")
    x, updates = add_input(model, "x", FLOAT, (rows, 2)), add_input(model, "updates", FLOAT, (3, 2))
    sizes = writer.constant([5, 2], "sizes")
    filled = ir.node("ConstantOfShape", [sizes], {"value": ir.tensor(np.array([fill], np.float32))})
    filled.outputs[0].name = "filled"
    model.graph.append(filled)
    indices = writer.constant([[4], [1], [4]], "indices")
    scattered = writer.apply("ScatterND", filled.outputs[0], indices, updates, reduction=reduction)
    scattered.type, scattered.shape = ir.TensorType(FLOAT), ir.Shape((5, 2))
    total = writer.apply("Add", *((scattered, x) if turned else (x, scattered)))
    add_output(model, writer.apply("Neg", total), "result", FLOAT, (5, 2))
    generator = np.random.default_rng(0)
    given = {
        name: generator.standard_normal(size).astype(np.float32)
        for name, size in (("x", (rows, 2)), ("updates", (3, 2)))
    }

    def run() -> np.ndarray:
        session = onnxruntime.InferenceSession(ir.serde.serialize_model(model).SerializeToString())
        return np.asarray(session.run(None, given)[0])

    before = run()
    assert add_into_scatters(model) == count
    assert np.allclose(run(), before, atol=1e-6)
    assert [node.op_type for node in model.graph].count("Add") == 1 - count
