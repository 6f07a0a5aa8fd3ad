"""Outputs that torch cannot compute and training does not need are left out."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch

import onward
from onward.errors import OperatorError


def test_an_operator_without_a_lowering_beside_the_network_is_left_out(tmp_path: Path) -> None:
    """The class behind labels and maps: any part that torch cannot compute and training does not need."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17, "acme": 1]> g (float[n, 2] x) => (float[n, 2] y, float[n, 2] side) '
        "<float[2, 2] w = {1, 2, 3, 4}> { y = MatMul(x, w) side = acme.Detector(y) }"
    )
    net = onward.to_torch(model)
    assert tuple(net(torch.ones(3, 2)).shape) == (3, 2)
    assert list(net.graph.left_out) == ["side"]
    onward.export(net, tmp_path / "out.onnx")
    assert [node.op_type for node in onnx.load(tmp_path / "out.onnx").graph.node] == ["MatMul", "Detector"]
    del model.graph.output[0]
    with pytest.raises(OperatorError, match="Detector"):
        onward.to_torch(model)


def test_strings_as_inputs_say_where_to_cut(tmp_path: Path) -> None:
    """Cut where the message says, what is behind the strings trains."""
    text = (
        '<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 1]> g (string[n, 1] city, float[n, 2] x) => '
        '(float[n, 1] y) <int64[2] flat = {-1, 2}> { hot = ai.onnx.ml.OneHotEncoder <cats_strings = ["a", "b"]> '
        "(city) rows = Reshape(hot, flat) all = Concat <axis = 1> (rows, x) "
        "y = ai.onnx.ml.LinearRegressor <coefficients = [1.0, 2.0, 3.0, 4.0]> (all) }"
    )
    model = onnx.parser.parse_model(text)
    onnx.save(model, tmp_path / "text.onnx")
    with pytest.raises(OperatorError) as caught:
        onward.to_torch(tmp_path / "text.onnx")
    for part in ("reads strings", "'city'", "from them are 'hot'", "extract_model(model, part, ['hot', 'x'], ['y'])"):
        assert part in str(caught.value)
    onnx.utils.extract_model(str(tmp_path / "text.onnx"), str(tmp_path / "part.onnx"), ["hot", "x"], ["y"])
    net = onward.to_torch(tmp_path / "part.onnx")
    assert len(net.weights) == 1
    result = net(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]), torch.ones(2, 2))
    assert result.reshape(-1).tolist() == [8.0, 9.0]
