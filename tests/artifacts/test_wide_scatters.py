"""Sums at indices of half floats are those of float32, rounded once."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime

from onward.artifacts.wide_scatters import widen_scatters

TEXT = """<ir_version: 10, opset_import: ["" : 18]>
sums (float16[4, 2] x, int64[3, 2] at, float16[3, 2] more) => (float16[4, 2] sums, float16[4, 2] kept) {
    sums = ScatterElements <axis = 0, reduction = "add"> (x, at, more)
    kept = ScatterElements <axis = 0> (x, at, more)
}"""


def test_sums_at_indices_are_computed_in_float32() -> None:
    model = ir.from_onnx_text(TEXT)
    assert widen_scatters(model) == 1
    assert [value.name for value in model.graph.outputs] == ["sums", "kept"]
    session = onnxruntime.InferenceSession(ir.serde.serialize_model(model).SerializeToString())
    x, more = (
        np.full((4, 2), 2048, np.float16),
        np.array([[2, 1], [1, 0], [1, 1]], np.float16),
    )  # 2048 + 1 is 2048 in float16
    at = np.zeros((3, 2), np.int64)
    sums, _ = session.run(None, {"x": x, "at": at, "more": more})
    assert np.asarray(sums).tolist() == [[2052, 2050], [2048, 2048], [2048, 2048], [2048, 2048]]
