"""mapped_dimensions: bound in inputs, outputs and values, expressions evaluated, misfits said in words."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, parser

from onward.errors import ModelError
from onward.graph.reading.dimensions import (
    bind_dimensions,
    evaluate_dimension,
    name_open_dimensions,
    symbolic_dimensions,
)
from onward.graph.reading.model_file import read_model
from onward.graph.training_graph import make_training_graph


def _model() -> onnx.ModelProto:
    return parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 13]>
        own (float[batch, sequence, 4] x, float[batch] scale, float[3] fixed) => (float[rows, 4] y, float[batch] z)
        <int64[2] sizes = {-1, 4}, float[batch, sequence, 4] h>
        { h = Relu(x) y = Reshape(h, sizes) z = Neg(scale) }"""
    )


def _shapes(model: ir.Model) -> dict[str, list]:
    values = [*model.graph.inputs, *model.graph.outputs, *(v for n in model.graph for v in n.outputs)]
    return {str(v.name): [d if isinstance(d, int) else d.value for d in v.shape] for v in values}


def test_symbols_and_places():
    assert symbolic_dimensions(read_model(_model())) == {
        "batch": ("x[0]", "scale[0]"),
        "sequence": ("x[1]",),
    }


def test_binding():
    """Every place that names the dimension becomes the number; other symbols stay; ONNX Runtime runs the result."""
    model = read_model(_model())
    bind_dimensions(model, {"batch": 8})
    shapes = _shapes(model)
    assert shapes["x"] == [8, "sequence", 4]
    assert shapes["h"] == [8, "sequence", 4]
    assert shapes["scale"] == [8]
    assert shapes["z"] == [8]
    assert shapes["y"] == ["rows", 4]
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    feeds = {"x": np.ones((8, 2, 4), np.float32), "scale": np.ones(8, np.float32), "fixed": np.ones(3, np.float32)}
    assert session.run(["y"], feeds)[0].shape == (16, 4)


def test_expressions():
    """What torch's exporter writes for sizes that depend on others."""
    sizes = {"batch": 8, "s0": 3}
    assert evaluate_dimension("2*batch", sizes) == 16
    assert evaluate_dimension("(batch + s0)//2 - 1", sizes) == 4
    assert evaluate_dimension("Max(1, batch)", sizes) == 8
    assert evaluate_dimension("batch*sequence", sizes) is None
    assert evaluate_dimension("__import__('os')", sizes) is None
    assert evaluate_dimension("a dimension", sizes) is None
    assert evaluate_dimension("batch // 0", sizes) is None


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"bacth": 8}, "the model's symbolic dimensions are 'batch' (x[0], scale[0]); 'sequence' (x[1])."),
        ({"bacth": 8}, "Did you mean 'batch'?"),
        ({"batch": 0}, "gives 'batch' the size 0; expected a whole number of at least 1"),
        ({"batch": 2.5}, "gives 'batch' the size 2.5"),
        ({"batch": True}, "gives 'batch' the size True"),
    ],
)  # fmt: skip
def test_misfits(sizes: dict, words: str):
    with pytest.raises(ModelError) as raised:
        bind_dimensions(read_model(_model()), sizes)
    assert words in str(raised.value)


def test_a_model_without_symbols():
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3])],
    )  # fmt: skip
    with pytest.raises(ModelError, match=r"'batch', but no input of the model has a symbolic dimension: x \[2,3\]"):
        bind_dimensions(read_model(helper.make_model(graph)), {"batch": 8})


def test_a_contradiction_with_a_fixed_size():
    """A constant of 4 rows meets a batch of 8."""
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 13]> own (float[batch] x) => (float[batch] y)
        <float[4] four = {1.0, 2.0, 3.0, 4.0}> { y = Add(x, four) }"""
    )
    bind_dimensions(read_model(model), {"batch": 4})
    with pytest.raises(
        ModelError, match=r"\{'batch': 8\} contradict a size that the model fixes: .*Incompatible dimensions"
    ):
        bind_dimensions(read_model(model), {"batch": 8})


def test_a_size_that_would_be_negative():
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 13]> own (float[batch] x) => (float[rest] y)
        <int64[1] three = {3}, int64[1] end = {100}> { y = Slice(x, three, end) }"""
    )
    read = read_model(model)
    read.graph.outputs[0].shape = ir.Shape(["batch - 3"])
    with pytest.raises(ModelError, match=r"\{'batch': 2\} makes the dimension 'batch - 3' of 'y' negative \(-1\)"):
        bind_dimensions(read, {"batch": 2})


def test_open_dimensions_without_a_name_get_one_each():
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 13]>
        own (float[unk, unk2] x, float[N, 2] scale) => (float[unk, unk2] y) { y = Relu(x) }"""
    )
    for size in model.graph.input[0].type.tensor_type.shape.dim:
        size.ClearField("dim_param")
    read = read_model(model)
    name_open_dimensions(read)
    assert symbolic_dimensions(read) == {"batch": ("x[0]",), "x_axis1": ("x[1]",), "N": ("scale[0]",)}
    bind_dimensions(read, {"x_axis1": 5})
    assert [d if isinstance(d, int) else d.value for d in read.graph.inputs[0].shape] == ["batch", 5]


def test_a_dimension_of_minus_one_is_open():
    """PaddlePaddle's exporter writes it, and ONNX Runtime takes it so; the user's own graph keeps it."""
    model = _model()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    graph = make_training_graph(model)
    assert [d if isinstance(d, int) else d.value for d in graph.model.graph.inputs[0].shape] == ["batch", "sequence", 4]
    assert graph.source.graph.inputs[0].shape[0] == -1
