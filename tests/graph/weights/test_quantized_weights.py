"""Stored integers and their scales do not train, and that is reported."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onward
from onward.errors import ModelError
from onward.graph.inspection.facts import inspect
from onward.graph.inspection.text import render
from onward.graph.training_graph import make_training_graph
from tests.graph.weights.models_in_text import RNG, model_of, normal


def quantized() -> onnx.ModelProto:
    """A layer quantized dynamically, one by QDQ, and a float one."""
    return model_of(
        """(float[N, 8] x) => (float[N, 4] y)
        { q, s, z = DynamicQuantizeLinear(x)  p = MatMulInteger(q, w1, z, zero)  f = Cast<to = 1>(p)
          both = Mul(s, w1_scale)  a = Mul(f, both)  b = Relu(a)
          r = QuantizeLinear(b, b_scale, zero)  d = DequantizeLinear(r, b_scale, zero)
          v = DequantizeLinear(w2, w2_scale, zero)  c = MatMul(d, v)  y = Add(c, bias) }""",
        w1=RNG.integers(-100, 100, (8, 8)).astype(np.int8), w2=RNG.integers(-100, 100, (8, 4)).astype(np.int8),
        zero=np.int8(0), w1_scale=np.float32([0.01]), w2_scale=np.float32(0.02), b_scale=np.float32(0.1),
        bias=normal(4),
    )  # fmt: skip


def test_integers_and_their_scales_do_not_train_and_that_is_reported() -> None:
    model = quantized()
    model.graph.node[0].op_type = "DynamicQuantizeLinear"
    graph = make_training_graph(model)
    assert graph.weights == ("bias",)
    assert {graph.frozen[name] for name in ("w1", "w2")} == {"a weight stored as 8-bit integers"}
    assert {graph.frozen[name] for name in ("w1_scale", "w2_scale", "b_scale")} == {"a quantization scale"}
    (note,) = (note for note in graph.notes if "are not trainable" in note)
    assert note.startswith("99 of 103 parameters are not trainable: 2 x a weight stored as 8-bit integers (w1, w2; 96 ")
    assert "train the model from before quantization and quantize it afterwards (onward export --quantize)" in note
    text = render(inspect(model))
    assert "2  a weight stored as 8-bit integers          96  96 B  w1, w2" in text
    assert "3  a quantization scale                        3  12 B  w1_scale, w2_scale, b_scale" in text


def test_a_scale_named_exactly_trains_an_integer_cannot() -> None:
    assert "b_scale" in make_training_graph(quantized(), weights_to_train=["b_scale", "bias"]).weights
    with pytest.raises(
        ModelError, match=r"training\.weights_to_train names 'w1', a weight stored as 8-bit integers, which"
    ):
        make_training_graph(quantized(), weights_to_train=["w1"])


def test_a_model_of_integers_only_says_what_to_do() -> None:
    model = quantized()
    del model.graph.initializer[-1]
    model.graph.node[-1].CopyFrom(onnx.helper.make_node("Identity", ["c"], ["y"]))
    with pytest.warns(UserWarning, match=r"get no gradient: train adapters next to them \(adapter.rank\), dequantize"):
        onward.to_torch(model)
