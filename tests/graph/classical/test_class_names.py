"""The names that a classifier gives to its classes."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from onward.graph.classical.class_names import find_class_names


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ('y = ai.onnx.ml.ZipMap<classlabels_strings = ["a", "größe"]>(x)', ("a", "größe")),
        ("y = ai.onnx.ml.ZipMap<classlabels_int64s = [3, -1]>(x)", ("3", "-1")),
        ("l, y = ai.onnx.ml.SVMClassifier<classlabels_ints = [0, 1]>(x)", ("0", "1")),
        ('t = Constant<value = string[2] {"b", "c"}>() y = ai.onnx.ml.ArrayFeatureExtractor(t, x)', ("b", "c")),
        ("t = Constant<value = int64[1, 2] {7, 8}>() y = ai.onnx.ml.ArrayFeatureExtractor(t, x)", ("7", "8")),
        ("y = ai.onnx.ml.ArrayFeatureExtractor(x, x)", ()),
        ("y = Relu(x)", ()),
    ],
)
def test_where_names_are_stored(body: str, names: tuple[str, ...]) -> None:
    text = f'<ir_version: 8, opset_import: ["": 18, "ai.onnx.ml": 3]> g (float[n, 2] x) => (y) {{ {body} }}'
    assert find_class_names(ir.from_proto(onnx.parser.parse_model(text))) == names
