"""Which weights get adapters, of which rank, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from onward.errors import ModelError
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from onward.parameters import Adapter, AdapterRule
from tests.mlp import build_mlp


def test_rules_give_single_weights_their_rank_and_alpha():
    rules = (AdapterRule(weights="w2", rank=1, alpha=5.0),)
    net = OnnxModule(make_training_graph(build_mlp(), adapter=Adapter(rank=3, alpha=6.0, targets=("w*",), rules=rules)))
    found = {name: (one.rank, one.scale) for name, one in net.graph.adapters.items()}
    assert found == {"w1": (3, 2.0), "w2": (1, 5.0)}


def _quantized(is_static: bool) -> onnx.ModelProto:
    """A linear layer of a block whose int8 weight is dequantized, or multiplied as it is; results without shapes."""
    weight = np.random.default_rng(0).integers(-9, 9, (6, 4), np.int8)
    stored = {"layers.0.proj.weight": weight, "scale": np.float32(0.1), "ones": np.ones(4, np.float32)}
    nodes = [
        onnx.helper.make_node("DequantizeLinear", ["layers.0.proj.weight", "scale"], ["w"]),
        onnx.helper.make_node("MatMul", ["x", "w"], ["p"]),
    ]
    if not is_static:
        nodes = [
            onnx.helper.make_node("DynamicQuantizeLinear", ["x"], ["xq", "xs", "xz"]),
            onnx.helper.make_node("MatMulInteger", ["xq", "layers.0.proj.weight", "xz"], ["i"]),
            onnx.helper.make_node("Cast", ["i"], ["f"], to=onnx.TensorProto.FLOAT),
            onnx.helper.make_node("Mul", ["f", "xs"], ["p"]),
        ]
    graph = onnx.helper.make_graph(
        [*nodes, onnx.helper.make_node("Mul", ["p", "ones"], ["y"])],
        "quantized",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 6])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in stored.items()],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


def test_quantized_layers_are_chosen_where_they_are_dequantized():
    graph = make_training_graph(_quantized(is_static=True), adapter=Adapter(rank=2))
    assert list(graph.adapters) == ["layers.0.proj.weight"]
    with pytest.raises(ModelError, match=r"proj\.weight cannot .* MatMulInteger multiplies .* --dequantize float"):
        make_training_graph(_quantized(is_static=False), adapter=Adapter(rank=2))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"targets": ("w3",)}, ("adapter.targets: 'w3' matches none of the 2 matrices", "Did you mean 'w")),
        (
            {"targets": ("w1",), "rules": (AdapterRule(weights="w2"),)},
            ("adapter.rules: 'w2' matches none of the 1 adapted",),
        ),
        ({"targets": ("w1",), "train_too": ("c",)}, ("adapter.train_too: 'c' matches none of the 4 trainable",)),
        ({"targets": ("w1",), "train_too": ("w*",)}, ("adapter.train_too names w1", "leave it out of one of the two")),
        ({"targets": ("w1",), "rank": 7, "start": "pissa"}, ("which has 6 singular vectors. Set a lower rank",)),
    ],
)
def test_mistakes_are_named(settings: dict[str, Any], words: tuple[str, ...]):
    with pytest.raises(ModelError) as caught:
        make_training_graph(build_mlp(), adapter=Adapter(**{"rank": 2, **settings}))
    for word in words:
        assert word in str(caught.value)
