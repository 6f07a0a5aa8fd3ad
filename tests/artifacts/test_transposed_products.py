"""Products of transposed matrices are the same without the transposes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime

from onward.artifacts.optimizer_graph import add_input, add_output, empty_model
from onward.artifacts.transposed_products import fold_transposes
from onward.graph.nodes.node_writer import NodeWriter

FLOAT, INT32 = ir.DataType.FLOAT, ir.DataType.INT32


def test_matrices_are_read_as_they_are() -> None:
    model = empty_model("products")
    writer = NodeWriter(model, "")
    shapes = {"a": (4, 3), "b": (4, 5), "c": (2, 3), "square": (3, 3), "batch": (2, 3, 5), "whole": (4, 3)}
    inputs = {name: add_input(model, name, INT32 if name == "whole" else FLOAT, size) for name, size in shapes.items()}

    def turned(name: str, perm: tuple[int, ...] = (1, 0)) -> ir.Value:
        value = writer.apply("Transpose", inputs[name], perm=list(perm))
        value.type = inputs[name].type
        value.shape = ir.Shape([shapes[name][axis] for axis in perm])
        return value

    factors = [
        (turned("a"), inputs["b"]),
        (inputs["a"], turned("c")),
        (inputs["c"], inputs["batch"]),  # not of two matrices
        (inputs["a"], turned("square", (0, 1))),  # not transposed
        (turned("a"), inputs["whole"]),  # not of float32: replaced below
    ]
    sizes = [(3, 5), (4, 2), (2, 2, 5), (4, 3), (3, 3)]
    for number, ((left, right), size) in enumerate(zip(factors, sizes, strict=True)):
        if right is inputs["whole"]:
            left = writer.cast(left, INT32)
            left.shape = ir.Shape((3, 4))
        product = writer.apply("MatMul", left, right)
        add_output(model, product, f"result_{number}", INT32 if right is inputs["whole"] else FLOAT, size)
    generator = np.random.default_rng(0)
    feeds = {name: generator.random(size, np.float32) for name, size in shapes.items()}
    feeds["whole"] = (feeds["whole"] * 9).astype(np.int32)

    def run() -> list[np.ndarray]:
        session = onnxruntime.InferenceSession(ir.serde.serialize_model(model).SerializeToString())
        return [np.asarray(found) for found in session.run(None, feeds)]

    before = run()
    assert fold_transposes(model) == 2
    for mine, expected in zip(run(), before, strict=True):
        assert np.allclose(mine, expected, atol=1e-6)
    kinds = [node.op_type for node in model.graph]
    assert (kinds.count("Gemm"), kinds.count("MatMul")) == (2, 3)
    assert [value.name for value in model.graph.outputs] == [f"result_{number}" for number in range(5)]
