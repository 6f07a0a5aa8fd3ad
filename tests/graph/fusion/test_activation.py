"""Activations written out become one call with the same values and gradients (1e-10)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.graph.fusion.pairs import assert_fused, both, kinds, parse
from tests.graph.fusion.written_out import SHAPE, SIGNATURE, inputs, used

ROOT_HALF, ROOT_2_PI = math.sqrt(0.5), math.sqrt(2 / math.pi)


ACTIVATION_NUMBERS = {
    "half": 0.5, "one": 1.0, "two": 2.0, "three": 3.0, "root2": math.sqrt(2), "root_half": ROOT_HALF, "k": ROOT_2_PI,
    "cube": 0.044715, "kcube": 0.044715 * ROOT_2_PI, "alpha": 1.702,
}  # fmt: skip
ERF = "a = Div(x, root2)\nt = Erf(a)\n"
ERF_FORMS = {
    "BERT's": f"{ERF}o = Add(t, one)\np = Mul(x, o)\ny = Mul(p, half)",
    "half first": f"{ERF}o = Add(one, t)\nh = Mul(x, half)\ny = Mul(h, o)",
    "half inside": f"{ERF}o = Add(t, one)\nh = Mul(half, o)\ny = Mul(h, x)",
    "divided by two": "a = Mul(x, root_half)\nt = Erf(a)\no = Add(t, one)\np = Mul(x, o)\ny = Div(p, two)",
    "multiplied out": f"{ERF}p = Mul(x, t)\nq = Add(x, p)\ny = Mul(q, half)",
}
TANH_FORMS = {
    "GPT-2's": (
        "q = Pow(x, three)\nr = Mul(q, cube)\ns = Add(x, r)\na = Mul(s, k)\nt = Tanh(a)\n"
        "o = Add(t, one)\nh = Mul(x, half)\ny = Mul(h, o)"
    ),
    "products": (
        "q = Mul(x, x)\nr = Mul(q, x)\ns = Mul(r, cube)\nu = Add(s, x)\na = Mul(k, u)\nt = Tanh(a)\n"
        "o = Add(one, t)\nh = Mul(half, o)\ny = Mul(x, h)"
    ),
    "Horner": (
        "q = Mul(x, cube)\nr = Mul(q, x)\ns = Add(r, one)\nu = Mul(x, k)\na = Mul(u, s)\nt = Tanh(a)\n"
        "o = Add(t, one)\nh = Mul(x, half)\ny = Mul(h, o)"
    ),
    "multiplied out": (
        "q = Pow(x, three)\nr = Mul(q, kcube)\ns = Mul(x, k)\na = Add(s, r)\nt = Tanh(a)\n"
        "o = Add(t, one)\np = Mul(x, o)\ny = Mul(p, half)"
    ),
}  # fmt: skip
SWISH_FORMS = {
    "SiLU": "t = Sigmoid(x)\ny = Mul(x, t)",
    "the other way round": "t = Sigmoid(x)\ny = Mul(t, x)",
    "with a factor": "a = Mul(x, alpha)\nt = Sigmoid(a)\ny = Mul(x, t)",
}
ACTIVATIONS = [
    *((f"erf: {name}", body, "gelu", lambda x: F.gelu(x)) for name, body in ERF_FORMS.items()),
    *((f"tanh: {name}", body, "gelu", lambda x: F.gelu(x, approximate="tanh")) for name, body in TANH_FORMS.items()),
    *((f"swish: {name}", body, "swish", None) for name, body in SWISH_FORMS.items()),
]


@pytest.mark.parametrize(("body", "kind", "original"), [a[1:] for a in ACTIVATIONS], ids=[a[0] for a in ACTIVATIONS])
def test_activations(body: str, kind: str, original: Any) -> None:
    model = parse(*SIGNATURE, body, used(body, ACTIVATION_NUMBERS))
    _, fused = assert_fused(model, inputs(), {kind: 1})
    assert [node.op_type for node in fused.graph.model.graph] == [{"gelu": "Gelu", "swish": "Swish"}[kind]]
    if original is not None:
        x = inputs()["x"]
        torch.testing.assert_close(fused(x=x), original(x), rtol=1e-10, atol=1e-10)


def test_numbers_that_are_not_those_of_gelu() -> None:
    body = ERF_FORMS["BERT's"]
    for wrong in ({"root2": 1.4}, {"half": 0.51}, {"one": 1.001}, {"root2": float(np.float32(math.sqrt(2)))}):
        _, fused = both(parse(*SIGNATURE, body, used(body, {**ACTIVATION_NUMBERS, **wrong})))
        assert kinds(fused.graph) == {}, wrong


@pytest.mark.parametrize("read_twice", [False, True])
def test_swiglu(read_twice: bool) -> None:
    body = "t = Sigmoid(x)\ng = Mul(x, t)\ny0 = Mul(g, u)\ny = " + ("Add(y0, g)" if read_twice else "Neg(y0)")
    model = parse("double[2,3,8] x, double[2,3,8] u", "double[2,3,8] y", body)
    given = inputs(u=torch.randn(SHAPE, generator=torch.Generator().manual_seed(5), dtype=torch.float64))
    assert_fused(model, given, {"swish": 1} if read_twice else {"swish": 1, "swiglu": 1})
