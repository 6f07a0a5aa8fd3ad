"""Products that are clipped to 0 and 1 are the same as one operator."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime

from onward.artifacts.clipped_products import write_masks_at_once
from onward.artifacts.optimizer_graph import add_input, add_output, empty_model
from onward.graph.nodes.node_writer import NodeWriter

FLOAT = ir.DataType.FLOAT


def test_masks_are_one_operator() -> None:
    model = empty_model("masks")
    writer = NodeWriter(model, "")
    x = add_input(model, "x", FLOAT, (6,))
    zero, one, two = (writer.constant(number, f"number_{number}", np.float32) for number in (0.0, 1.0, 2.0))
    huge = writer.constant(np.finfo(np.float32).max, "huge", np.float32)
    row = writer.constant(np.full((1, 1), 0.5), "row", np.float32)
    values = [
        writer.apply("Clip", writer.apply("Mul", x, huge), zero, one),
        writer.apply("Clip", writer.apply("Mul", x, huge), zero, two),  # other bounds
        writer.apply("Clip", writer.apply("Mul", x, x), zero, one),  # no constant
        writer.apply("Clip", writer.apply("Mul", x, row), zero, one),  # a result of another rank
    ]
    for number, value in enumerate(values):
        add_output(model, value, f"result_{number}", FLOAT, (6,) if number < 3 else (1, 6))
    given = np.array([-np.inf, -1.0, 0.0, 1e-37, 2.0, np.inf], np.float32)

    def run() -> list[np.ndarray]:
        session = onnxruntime.InferenceSession(ir.serde.serialize_model(model).SerializeToString())
        return [np.asarray(found) for found in session.run(None, {"x": given})]

    before = run()
    assert write_masks_at_once(model) == 1
    found = run()
    assert [*found[0]] == [0, 0, 0, 1, 1, 1]
    assert all(np.array_equal(mine, expected) for mine, expected in zip(found, before, strict=True))
