"""Biases of zeros go, others stay."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime

from onward.artifacts.zero_biases import drop_zero_biases

TEXT = """<ir_version: 10, opset_import: ["" : 18]>
net (float[1, 2, 4, 4] x, float[2, 2, 3, 3] w, float[2] given) => (float[1, 2, 6, 6] y)
<float[2] zeros = {0, 0}, float[2] ones = {1, 0}, float[1] zero = {0}, int64[1] two = {2}> {
    a = Conv <pads = [1, 1, 1, 1]> (x, w, zeros)
    b = Conv <pads = [1, 1, 1, 1]> (a, w, ones)
    expanded = Expand (zero, two)
    c = Conv <pads = [1, 1, 1, 1]> (b, w, expanded)
    d = Conv <pads = [1, 1, 1, 1]> (c, w, given)
    y = ConvTranspose (d, w, zeros)
}"""


def test_biases_of_zeros_are_dropped() -> None:
    model = ir.from_onnx_text(TEXT)
    generator = np.random.default_rng(0)
    given = {"x": (1, 2, 4, 4), "w": (2, 2, 3, 3), "given": (2,)}
    arrays = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in given.items()}
    before, after = ir.to_proto(model), None
    assert drop_zero_biases(model) == 3
    after = ir.to_proto(model)
    assert [len(node.input) for node in after.graph.node] == [2, 3, 2, 3, 2]
    assert {one.name for one in after.graph.initializer} >= {"ones"}
    assert not {"zeros", "zero"} & {one.name for one in after.graph.initializer}
    found = [onnxruntime.InferenceSession(one.SerializeToString()).run(None, arrays)[0] for one in (before, after)]
    assert np.abs(found[0] - found[1]).max() < 1e-5
