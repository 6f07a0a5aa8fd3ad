"""A quantized model in real numbers, as a file: never over the model itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from onward.artifacts.dequantized_model import write_dequantized
from onward.errors import ModelError


def save(folder: Path) -> Path:
    text = """<ir_version: 8, opset_import: ["": 19]> g (float[n, 2] x) => (float[n, 2] y)
        <float s = {0.5}, int8 z = {0}> { w = DequantizeLinear(q, s, z) y = MatMul(x, w) }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([[2, -4], [6, 127]], np.int8), "q"))
    onnx.save(model, folder / "net.onnx")
    return folder / "net.onnx"


@pytest.mark.parametrize("keep_rounding", [True, False])
def test_what_is_written_computes_the_same(keep_rounding: bool, tmp_path: Path) -> None:
    source = save(tmp_path)
    before = source.read_bytes()
    result = write_dequantized(source, tmp_path / "deep" / "float.onnx", keep_rounding=keep_rounding)
    assert result.describe() == "4 stored integers are now float32 parameters; no operator computed with integers."
    written = onnx.load(tmp_path / "deep" / "float.onnx")
    assert any(
        one.data_type == onnx.TensorProto.FLOAT and list(one.dims) == [2, 2] for one in written.graph.initializer
    )
    (found,) = onnx.reference.ReferenceEvaluator(written).run(None, {"x": np.eye(2, dtype=np.float32)})
    np.testing.assert_allclose(found, [[1, -2], [3, 63.5]])
    assert source.read_bytes() == before


def test_the_model_itself_is_not_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"cannot be written over the model itself, 'net\.onnx'"):
        write_dequantized(source, "net.onnx")
