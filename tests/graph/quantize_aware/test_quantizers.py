"""Where a model is quantized: what was put into it, and the first node that quantizes a value."""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir

from onward.graph.quantize_aware.quantizers import QUANTIZERS, Quantizer, quantizers_of, quantizing_nodes


def quantizer(value: str, scale: str, **given: Any) -> Quantizer:
    fields = {
        "zero_point": "z", "is_weight": False, "axis": None, "largest": 127, "is_signed": True, "elements": 4,
        "is_calibrated": True, "observer": "lsq",
    }  # fmt: skip
    return Quantizer(value=value, scale=scale, **{**fields, **given})


def test_values_may_share_a_scale() -> None:
    model = ir.Model(ir.Graph([], [], nodes=[]), ir_version=10)
    assert quantizers_of(model) == ()
    model.meta[QUANTIZERS] = (quantizer("a", "s"), quantizer("b", "t"), quantizer("c", "s"))
    assert [one.scale for one in quantizers_of(model)] == ["s", "t", "s"]


def test_the_first_node_of_each_value() -> None:
    text = """<ir_version: 8, opset_import: ["": 18, "acme": 1]> g (float[2] x, float[2] v, float s) => (q, r, p)
        { q = QuantizeLinear(x, s) r = QuantizeLinear(x, s) p = acme.QuantizeLinear(v, s) }"""
    found = quantizing_nodes(ir.from_proto(onnx.parser.parse_model(text)).graph)
    assert {name: node.outputs[0].name for name, node in found.items()} == {"x": "q"}
