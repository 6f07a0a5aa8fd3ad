"""`onward inspect` asks the registry and the ledger what can be lowered."""

from __future__ import annotations

from onnx import parser

from onward.lowering.inspection import describe, why_not_lowered


def test_why_not_lowered():
    assert why_not_lowered("", "MatMul", 13) is None
    assert why_not_lowered("", "LayerNormalization", 17) is None
    assert "strings" in why_not_lowered("", "StringConcat", 20)
    assert why_not_lowered("com.acme", "Squash", 3) == "no lowering of it at version 3 of its domain is known"


def test_describe():
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17, "com.acme" : 3]> net (float[N] x) => (float[N] y)
        { a = Relu(x) y = com.acme.Squash(a) }"""
    )
    text = describe(model, weight_rows=1)
    assert text.startswith("net\n  ai.onnx 17, com.acme 3")
    assert "Cannot be lowered" in text
    assert "com.acme.Squash  no lowering of it at version 3" in text
