"""Masks of clipped activations are the same in fewer operators."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime

from onward.artifacts.clipped_products import write_clip_gradients_directly, write_masks_at_once
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


def test_gradients_of_clips_are_products() -> None:
    model = empty_model("clips")
    writer = NodeWriter(model, "")
    x, gradient = (add_input(model, name, FLOAT, (7,)) for name in ("x", "gradient"))
    zero, six, one = (writer.constant(number, f"number_{number}", np.float32) for number in (0.0, 6.0, 1.0))

    def choice(low: ir.Value, high: ir.Value, other: ir.Value) -> ir.Value:
        conditions = writer.apply("LessOrEqual", x, high), writer.apply("GreaterOrEqual", x, low)
        found = writer.apply("Where", writer.apply("And", *conditions), gradient, other)
        found.type = ir.TensorType(FLOAT)
        return found

    values = [
        writer.apply("Clip", x, zero, six),
        choice(zero, six, zero),
        choice(zero, one, zero),  # clipped by other bounds
        choice(zero, six, one),  # not zero where it is clipped
    ]
    for number, value in enumerate(values):
        add_output(model, value, f"result_{number}", FLOAT, (7,))
    given = {
        "x": np.array([-np.inf, -1e-30, 0.0, 3.0, 6.0, 6.000001, np.nan], np.float32),
        "gradient": np.arange(1.0, 8.0, dtype=np.float32),
    }

    def run() -> list[np.ndarray]:
        session = onnxruntime.InferenceSession(ir.serde.serialize_model(model).SerializeToString())
        return [np.asarray(found) for found in session.run(None, given)]

    before = run()
    assert write_clip_gradients_directly(model) == 1
    found = run()
    assert [*found[1]] == [0, 0, 3, 4, 5, 0, 0]  # bounds belong to what is not clipped, as in torch
    assert all(np.array_equal(mine, wanted, equal_nan=True) for mine, wanted in zip(found, before, strict=True))
