"""Graphs whose export fixed the batch size, rewritten for any; those that cannot be say why."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onward.graph.rebatching.passes import NotRebatched, fixed_batch_size, rebatch_graph


def model_of(body: str, shape: str = "2, 4", out: str = "2, 4") -> ir.Model:
    text = f'<ir_version: 8, opset_import: ["": 18]> g (float[{shape}] x) => (float[{out}] y)'
    stored = "float[4] w = {1, 2, 3, 4}, int64[2] flat = {2, 4}, int64[1] first = {0}, int64 zero = {0}"
    return ir.from_proto(onnx.parser.parse_model(f"{text} <{stored}> {{ {body} }}"))


@pytest.mark.parametrize(("shape", "size"), [("2, 4", 2), ("n, 4", None), ("4", None), ("1, 1", 1)])
def test_the_size_that_the_export_fixed(shape: str, size: int | None) -> None:
    assert fixed_batch_size(model_of("y = Relu(x)", shape).graph) == size


def test_stored_sizes_are_rewritten_and_shapes_are_open(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of("a = Add(x, w) y = Reshape(a, flat)")
    done = rebatch_graph(model)
    assert (done.size, done.inputs, done.changes) == (2, ("x",), {"Reshape": 1})
    for value in (*model.graph.inputs, *model.graph.outputs):
        assert [str(size) for size in value.shape or ()] == ["batch", "4"]
    proto = ir.to_proto(model)
    assert caplog.records == []  # onnx_ir warns about a shape without a type, once per value
    (inner,) = (one for one in proto.graph.value_info if one.name == "a")
    assert [size.dim_param or size.dim_value for size in inner.type.tensor_type.shape.dim] == ["batch", 4]
    proto.graph.output[0].type.tensor_type.ClearField("shape")

    rows = np.ones((3, 4), np.float32)
    (found,) = onnx.reference.ReferenceEvaluator(proto).run(None, {"x": rows})
    np.testing.assert_array_equal(found, rows + np.arange(1, 5))


@pytest.mark.parametrize(
    ("body", "shape", "words"),
    [
        ("y = Relu(x)", "n, 4", "its batch size is not fixed"),
        ("m = ReduceMean(x, first) y = Sub(x, m)", "2, 4", "mixes the samples of a batch, or picks one of them"),
        ("g = Gather(x, zero) y = Identity(g)", "2, 4", "mixes the samples of a batch, or picks one of them"),
        ("y = Identity(w)", "2, 4", "none of its outputs depends on the batch"),
    ],
)
def test_why_not(body: str, shape: str, words: str) -> None:
    with pytest.raises(NotRebatched, match=words):
        rebatch_graph(model_of(body, shape))
