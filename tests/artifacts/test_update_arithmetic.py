"""Numbers that updates share, run by onnxruntime, against float64."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from onward.artifacts.optimizer_graph import add_input, add_output, empty_model
from onward.artifacts.update_arithmetic import UpdateArithmetic
from onward.graph.nodes.node_writer import NodeWriter


@pytest.mark.parametrize("decay", [0.0, 0.9, 0.999, 0.99999])
def test_corrections_keep_their_digits_in_float32(decay: float) -> None:
    """1 - decay ** count as it is written would lose five of them at 0.99999."""
    model = empty_model("correction")
    rate, count = add_input(model, "rate", ir.DataType.FLOAT, ()), add_input(model, "count", ir.DataType.INT64, ())
    arithmetic = UpdateArithmetic(
        writer=NodeWriter(model, ""), rate=rate, first_rate=rate, updates_before=count, shared={}
    )
    found = arithmetic.op("Mul", arithmetic.correction(decay, count, rate), rate)
    written = len(model.graph)
    assert arithmetic.op("Mul", arithmetic.correction(decay, count, rate), rate) is found
    assert len(model.graph) == written
    add_output(model, found, "found", ir.DataType.FLOAT, ())
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    for updates in (1, 7, 1000, 10**6):
        (value,) = session.run(None, {"rate": np.array(1, np.float32), "count": np.array(updates)})
        assert value == pytest.approx(1 - decay**updates, rel=1e-6)
