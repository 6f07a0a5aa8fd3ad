"""What is trained and what is frozen once a model has adapters."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from onward.errors import ModelError
from tests.graph.adapters.nets import adapted
from tests.mlp import build_mlp


def test_frozen_weights_are_no_parameters():
    net = adapted(build_mlp(), targets=("w1",), train_too=("w2", "b2"))
    assert list(net.weights) == ["w2", "b2", "w1.lora_A", "w1.lora_B"]
    assert not any(tensor.requires_grad for tensor in net.buffers())
    assert net.graph.frozen["w1"] == "frozen under its adapter"
    assert net.graph.frozen["b1"] == "frozen next to adapters"


@pytest.mark.parametrize(
    ("targets", "words"),
    [(("w1",), "next to 1 weight, which is frozen."), (("w1", "w2"), "next to 2 weights, which are frozen.")],
)
def test_the_note_counts_weights(targets: tuple[str, ...], words: str) -> None:
    assert any(note.endswith(words) for note in adapted(build_mlp(), targets=targets).graph.notes)


def test_a_weight_that_no_gradient_reaches_is_refused() -> None:
    """Its product is rounded to integers: it trained nothing, or ended in an error of torch's."""
    make, number = helper.make_node, numpy_helper.from_array
    constants = {
        "w": np.ones((4, 4), np.int8), "s": np.float32(0.1), "z": np.uint8(128), "t": np.int8(0),
    }  # fmt: skip
    nodes = [
        make("DequantizeLinear", ["w", "s", "t"], ["real"]),
        make("MatMul", ["x", "real"], ["h"]),
        make("QuantizeLinear", ["h", "s", "z"], ["q"]),
        make("QLinearConcat", ["s", "z", "q", "s", "z"], ["c"], domain="com.microsoft", axis=1),
        make("DequantizeLinear", ["c", "s", "z"], ["y"]),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [value("x", TensorProto.FLOAT, ["N", 4])], [value("y", TensorProto.FLOAT, ["N", 4])],
        [number(np.asarray(array), name) for name, array in constants.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    with pytest.raises(ModelError) as caught:
        adapted(helper.make_model(graph, opset_imports=opsets), rank=2, targets=("w",))
    assert str(caught.value) == (
        "no gradient reaches the adapter of w: what is computed with it is rounded to integers (QLinearConv and the "
        "like), or not used by the loss. Leave it out of adapter.targets, or train the dequantized file: onward export "
        "MODEL --dequantize qdq -o FILE."
    )
