"""ReLU after max pooling gives what it gives before it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime

from onward.artifacts.optimizer_graph import add_input, add_output, empty_model
from onward.device.activation_order import pool_before_activations
from onward.graph.nodes.node_writer import NodeWriter

FLOAT = ir.DataType.FLOAT


def test_relu_and_pooling_are_swapped_where_nothing_else_reads_it() -> None:
    model = empty_model("pooling")
    writer = NodeWriter(model, "")
    x = add_input(model, "x", FLOAT, (1, 2, 5, 5))
    windows = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
    swapped = writer.apply("MaxPool", writer.apply("Relu", x), **windows)
    read_twice = writer.apply("Relu", x)
    kept = writer.apply("MaxPool", read_twice, **windows)
    average = writer.apply("AveragePool", writer.apply("Relu", x), **windows)
    with_places = writer.new_node("MaxPool", [writer.apply("Relu", x)], "with_places", windows, outputs=2)
    model.graph.append(with_places)
    results = {"swapped": swapped, "kept": kept, "read_twice": read_twice, "average": average}
    for name, value in results.items():
        add_output(model, value, name, FLOAT, (1, 2, 5, 5) if name == "read_twice" else (1, 2, 3, 3))
    add_output(model, with_places.outputs[1], "places", ir.DataType.INT64, (1, 2, 3, 3))
    given = np.random.default_rng(0).standard_normal((1, 2, 5, 5)).astype(np.float32) - 1

    def run() -> list[np.ndarray]:
        session = onnxruntime.InferenceSession(ir.serde.serialize_model(model).SerializeToString())
        return [np.asarray(found) for found in session.run(None, {"x": given})]

    before = run()
    assert (before[0] == 0).any()
    assert pool_before_activations(model) == 1
    assert [node.op_type for node in model.graph][:2] == ["MaxPool", "Relu"]
    assert model.graph.outputs[0].name == "swapped"
    assert all(np.array_equal(*pair) for pair in zip(run(), before, strict=True))
