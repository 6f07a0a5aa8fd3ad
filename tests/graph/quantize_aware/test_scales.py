"""What finds scales is put between them and the nodes that read them."""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir
import pytest

from onward.graph.quantize_aware.quantizers import QUANTIZERS
from onward.graph.quantize_aware.scales import train_scales
from tests.graph.quantize_aware.test_quantizers import quantizer


def trained(**given: Any) -> tuple[ir.Model, tuple[tuple[str, ...], tuple[str, ...]]]:
    text = """<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (y) <float s = {0.5}, int8 z = {0}>
        { a = Relu(x) q = QuantizeLinear(a, s, z) y = DequantizeLinear(q, s, z) }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    model.meta[QUANTIZERS] = (quantizer("a", "s", **given), quantizer("gone", "t"))
    return model, train_scales(model, model)


def test_by_gradients() -> None:
    model, found = trained(elements=4, largest=100)
    assert found == (("s",), ())
    node = next(one for one in model.graph if one.op_type == "ScaleGradient")
    assert node.attributes["factor"].as_float() == pytest.approx(0.05)
    readers = [one for one in model.graph if one.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert all(one.inputs[1] is node.outputs[0] for one in readers)
    assert list(model.graph).index(node) == 1
    assert model.opset_imports["onward.fused"] == 1


@pytest.mark.parametrize(("is_signed", "axis", "span"), [(True, None, 127.5), (False, 1, 127.0)])
def test_by_moving_averages(is_signed: bool, axis: int | None, span: float) -> None:
    model, found = trained(observer="moving_average", is_signed=is_signed, axis=axis)
    assert found == ((), ("s",))
    node = next(one for one in model.graph if one.op_type == "MovingScale")
    assert [value.name for value in node.inputs if value is not None] == ["a", "s"]
    assert node.attributes["span"].as_float() == span
    assert ("axis" in node.attributes) is (axis is not None)
