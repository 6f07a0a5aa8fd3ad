"""`MoE` of ONNX Runtime becomes the node of all mixtures, with the values and gradients of the operator."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
import torch

from onward.graph.training_graph import make_training_graph
from tests.graph.fusion.pairs import kinds
from tests.graph.fusion.test_experts import RNG, D, E, H, assert_equal, tokens

DOUBLE = onnx.TensorProto.DOUBLE


def model(rank: int, names: str, hidden: int = H, **attributes: Any) -> onnx.ModelProto:
    """Tokens of 2 or 3 axes; `names` are the node's weights in order, `-` for one that is left out."""
    sizes = {"up": (E, hidden, D), "ub": (E, hidden), "down": (E, D, H), "db": (E, D), "value": (E, H, D), "vb": (E, H)}
    given = ["" if name == "-" else name for name in names.split()]
    node = onnx.helper.make_node("MoE", ["x", "logits", *given], ["y"], domain="com.microsoft", k=2, **attributes)
    stored = [onnx.numpy_helper.from_array(RNG.normal(size=sizes[name]), name) for name in given if name]
    axes = ["b", "n"][2 - (rank - 1) :]
    info = onnx.helper.make_tensor_value_info
    inputs = [info("x", DOUBLE, [*axes, D]), info("logits", DOUBLE, ["rows", E])]
    graph = onnx.helper.make_graph([node], "g", inputs, [info("y", DOUBLE, [*axes, D])], stored)
    imports = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=imports)


PLAIN, GATED = "up ub down db", "up - down - value"
SWIGLU = {"activation_type": "swiglu", "activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 0.5}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (PLAIN, {"activation_type": "silu"}),
    "normalized": (PLAIN, {"activation_type": "gelu", "normalize_routing_weights": 1}),
    "identity": ("up - down", {"activation_type": "identity"}),
    "alternating": (PLAIN, {**SWIGLU, "swiglu_fusion": 1, "hidden": 2 * H}),
    "halves": (PLAIN, {**SWIGLU, "swiglu_fusion": 2, "hidden": 2 * H}),
    "fc3": (GATED, {"activation_type": "silu"}),
    "fc3 with biases": (f"{PLAIN} value vb", SWIGLU),
}


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_the_operator_of_onnx_runtime(form: str, rank: int) -> None:
    names, attributes = FORMS[form]
    rows = (7,) if rank == 2 else (2, 3)
    count = 7 if rank == 2 else 6
    proto = model(rank, names, **attributes)
    assert_equal(proto, {**tokens(*rows, D), "logits": torch.randn(count, E, dtype=torch.float64)})


@pytest.mark.parametrize("attributes", [{"use_sparse_mixer": 1}, {"activation_type": "mish"}, {"swiglu_fusion": 0}])
def test_what_is_not_known_stays(attributes: dict[str, Any]) -> None:
    given = {"activation_type": "swiglu", **attributes}
    assert kinds(make_training_graph(model(2, PLAIN, 2 * H, **given), fuse=True)).get("experts") is None


def test_one_bias_of_two_stays() -> None:
    assert kinds(make_training_graph(model(2, "up ub down"), fuse=True)).get("experts") is None
