"""Shape inference of models of any size, and what it objects to."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onward.graph.nodes.shape_inference import contradiction, infer, inferred_values


def model_of(body: str, **tensors: np.ndarray) -> ir.Model:
    text = f'<ir_version: 8, opset_import: ["": 18, "ai.onnx.ml": 1]> g (float[n, 4] x) => (y) {{ {body} }}'
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in tensors.items())
    return ir.from_proto(proto)


def test_shapes_follow_though_weights_are_left_out() -> None:
    """A small constant is a shape and is seen; a weight is declared by its type and shape alone."""
    model = model_of("h = MatMul(x, w) y = Reshape(h, s)", w=np.zeros((4, 600), np.float32), s=np.array([-1, 20, 30]))
    found = inferred_values(model)
    assert [str(size) for size in found["h"].shape or ()] == ["n", "600"]
    assert [str(size) for size in found["y"].shape or ()][1:] == ["20", "30"]
    assert model.graph.initializers["w"].const_value is not None
    assert "w" in {value.name for value in infer(model, strict=False).graph.input}


def test_contradictions_in_one_line() -> None:
    assert contradiction(model_of("y = Relu(x)")) is None
    message = contradiction(model_of("y = MatMul(x, w)", w=np.zeros((3, 2), np.float32)))
    assert message is not None
    assert "Incompatible dimensions" in message
    assert "\n" not in message


def test_small_tensors_that_are_no_shapes_contradict_nothing() -> None:
    """As in the biases of ALiBi: onnx multiplies what it takes for lists of 2 and of 3 sizes, and fails by itself."""
    sizes = {"two": np.array([3, 4]), "three": np.array([3, 4, 5]), "axes": np.array([1])}
    model = model_of("columns = Unsqueeze(two, axes) z = Mul(columns, three) y = Relu(x)", **sizes)
    assert contradiction(model) is None
    assert [str(size) for size in inferred_values(model)["z"].shape or ()] == ["2", "3"]


def test_nothing_follows_where_inference_fails() -> None:
    model = model_of('z = ai.onnx.ml.LabelEncoder<classes_strings = ["a"]> (q) y = Relu(x)')
    with pytest.raises(ValueError, match="does not survive an input whose type is not known"):
        infer(model, strict=False)
    assert inferred_values(model) == {}
