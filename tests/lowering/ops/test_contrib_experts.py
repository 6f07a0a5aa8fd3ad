"""Mixture of experts of com.microsoft equals onnxruntime's CPU kernel, and its gradients finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

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
        wide = {name: None if v is None else v.astype(float) for name, v in inputs.items()}
        model = make_model("MoE", wide, attributes, 17, domain="com.microsoft")
        check_gradients(model, *(v for v in wide.values() if v is not None))


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


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"use_sparse_mixer": 1}, "MoE with a sparse mixer or with fc3 is not known"),
        (
            {"activation_type": "mish"},
            "activation_type 'mish' is not known; expected swiglu, relu, gelu, silu, identity",
        ),
        ({"activation_type": "swiglu"}, "swiglu_fusion is 0; 1 .* and 2 .* are known"),
    ],
)
def test_what_is_not_known_is_named(attributes: dict[str, Any], words: str) -> None:
    inputs = _inputs()
    with pytest.raises(NodeError, match=words):
        run(make_model("MoE", inputs, attributes, 17, domain="com.microsoft"), *inputs.values())
