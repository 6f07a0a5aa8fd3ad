"""Mixture of experts of com.microsoft equals onnxruntime's CPU kernel, and its gradients finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from onward.errors import NodeError
from tests.one_node import check_against_onnxruntime, check_gradients, make_model, normal, run

RANDOM = np.random.default_rng(0)
_draw = normal(RANDOM)
EXPERTS, HIDDEN, INNER = 4, 6, 5


def _inputs(rows: int = INNER, biases: bool = True, *tokens: int) -> dict[str, Any]:
    tokens = tokens or (7,)
    return {
        "x": _draw(*tokens, HIDDEN),
        "router": _draw(int(np.prod(tokens)), EXPERTS),
        "w1": _draw(EXPERTS, rows, HIDDEN),
        "b1": _draw(EXPERTS, rows) if biases else None,
        "w2": _draw(EXPERTS, HIDDEN, INNER),
        "b2": _draw(EXPERTS, HIDDEN) if biases else None,
    }


@pytest.mark.parametrize(
    ("attributes", "rows"),
    [
        ({}, INNER),
        ({"k": 2, "activation_type": "relu", "normalize_routing_weights": 1}, INNER),
        ({"k": 2, "activation_type": "silu"}, INNER),
        ({"k": 4, "activation_type": "gelu"}, INNER),
        ({"k": 1, "activation_type": "identity", "normalize_routing_weights": 1}, INNER),
        ({"k": 2, "activation_type": "swiglu", "swiglu_fusion": 1}, 2 * INNER),
        (
            {
                "k": 2,
                "activation_type": "swiglu",
                "swiglu_fusion": 1,
                "activation_alpha": 1.702,
                "activation_beta": 1.0,
                "swiglu_limit": 0.5,
            },
            2 * INNER,
        ),
    ],
)
def test_experts_equal_onnxruntime_and_have_gradients(attributes: dict[str, Any], rows: int) -> None:
    for inputs in (_inputs(rows), _inputs(rows, False), _inputs(rows, True, 2, 3)):
        model = make_model("MoE", inputs, attributes, 17, domain="com.microsoft")
        given = [value for value in inputs.values() if value is not None]
        check_against_onnxruntime(model, *given, rtol=1e-4, atol=1e-5)
    wide = {name: v.astype(float) for name, v in inputs.items()}
    check_gradients(make_model("MoE", wide, attributes, 17, domain="com.microsoft"), *wide.values())


def test_gate_and_value_one_after_the_other() -> None:
    """`swiglu_fusion` 2 is 1 with the rows of the first matrix in another order."""
    inputs = _inputs(2 * INNER)
    order = [index + half for index in range(INNER) for half in (0, INNER)]
    other = {**inputs, "w1": inputs["w1"][:, order], "b1": inputs["b1"][:, order]}
    results = [
        run(
            make_model(
                "MoE", given, {"activation_type": "swiglu", "swiglu_fusion": fusion}, 17, domain="com.microsoft"
            ),
            *given.values(),
        )
        for given, fusion in ((inputs, 2), (other, 1))
    ]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("biased", [(), ("b1", "b2", "b3"), ("b2",)], ids=str)
@pytest.mark.parametrize("activation", ["silu", "swiglu"])
def test_a_gate_of_its_own(activation: str, biased: tuple[str, ...]) -> None:
    """onnxruntime has fc3 on GPUs only; its test of Mixtral has this formula."""
    given = _inputs(INNER, True, 2, 3)
    inputs = {**given, "w3": _draw(EXPERTS, INNER, HIDDEN), "b3": _draw(EXPERTS, INNER)}
    inputs |= {name: None for name in ("b1", "b2", "b3") if name not in biased}
    attributes = {"activation_type": activation, "k": 2, "normalize_routing_weights": 1}
    result = run(make_model("MoE", inputs, attributes, 17, domain="com.microsoft"),
                    *(value for value in inputs.values() if value is not None))  # fmt: skip
    t = {name: torch.zeros(EXPERTS, 1) if v is None else torch.from_numpy(v) for name, v in inputs.items()}
    shares, chosen = torch.softmax(t["router"], -1).topk(2)
    shares = shares / shares.sum(-1, keepdim=True)
    x, expected = t["x"].view(-1, HIDDEN), torch.zeros(6, HIDDEN)
    for token in range(6):
        for share, e in zip(shares[token], chosen[token].tolist(), strict=True):
            gate, value = t["w1"][e] @ x[token] + t["b1"][e], t["w3"][e] @ x[token] + t["b3"][e]
            expected[token] += share * (t["w2"][e] @ (F.silu(gate) * value) + t["b2"][e])
    torch.testing.assert_close(torch.as_tensor(result), expected.view(2, 3, HIDDEN))


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"use_sparse_mixer": 1}, "MoE with a sparse mixer is not known"),
        (
            {"activation_type": "mish"},
            "activation_type 'mish' is not known; expected swiglu, relu, gelu, silu, identity",
        ),
        ({"activation_type": "swiglu"}, "swiglu_fusion is 0 without fc3; known are 0 with fc3 .*, 1 without .* and 2"),
    ],
)
def test_what_is_not_known_is_named(attributes: dict[str, Any], words: str) -> None:
    inputs = _inputs()
    with pytest.raises(NodeError, match=words):
        run(make_model("MoE", inputs, attributes, 17, domain="com.microsoft"), *inputs.values())
