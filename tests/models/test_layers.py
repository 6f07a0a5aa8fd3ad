"""Layers of reference models equal torch's at every opset."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F

from onward.models import layers
from onward.models.graph_writer import GraphWriter, normal
from tests.one_node import run_onnxruntime

X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))


def computed(build: Callable[[GraphWriter, ir.Value], ir.Value], opset: int, x: torch.Tensor = X) -> np.ndarray:
    writer = GraphWriter("g", opset, 0)
    value = build(writer, writer.input("x", ir.DataType.FLOAT, list(x.shape)))
    model = writer.finish([(value, list(x.shape))])
    return np.asarray(run_onnxruntime(ir.to_proto(model), x.numpy())[0])


@pytest.mark.parametrize("opset", [14, 17, 20, 23])
@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda w, x: layers.gelu(w, x), lambda x: F.gelu(x)),
        (lambda w, x: layers.gelu_tanh(w, x), lambda x: F.gelu(x, approximate="tanh")),
        (lambda w, x: layers.layer_norm(w, x, "n", 8, 1e-5), lambda x: F.layer_norm(x, (8,))),
        (lambda w, x: layers.merge_heads(w, layers.split_heads(w, x, 4)), lambda x: x),
        (lambda w, x: layers.dropout(w, x, 0.5), lambda x: x),
    ],
    ids=["gelu", "tanh", "norm", "heads", "dropout"],
)
def test_equal_to_torch(opset: int, build: Any, expected: Any) -> None:
    np.testing.assert_allclose(computed(build, opset), expected(X), rtol=1e-5, atol=1e-5)


def test_attention() -> None:
    def build(writer: GraphWriter, x: ir.Value) -> ir.Value:
        heads = layers.split_heads(writer, x, 4)
        scores = layers.attention_scores(writer, heads, heads, 4)
        return layers.merge_heads(writer, layers.attend(writer, scores, heads, 0.0))

    heads = X.unflatten(-1, (2, 4)).transpose(1, 2)
    expected = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
    np.testing.assert_allclose(computed(build, 18), expected, rtol=1e-5, atol=1e-5)


def test_he_initialization() -> None:
    drawn = layers.he_uniform(24)(np.random.default_rng(0), (20_000,))
    assert drawn.std() == pytest.approx(math.sqrt(2 / 24), rel=0.05)


def test_no_node_for_a_ratio_of_0() -> None:
    writer = GraphWriter("g", 18, 0)
    x = writer.input("x", ir.DataType.FLOAT, [1])
    assert layers.dropout(writer, x, 0) is x
    with writer.scope("a"):
        assert layers.linear(writer, x, "fc", 1, 2, normal(1.0)).producer().op_type == "Add"  # type: ignore[union-attr]
