"""Norms, activations and rotary embedding written out become one call with the same values and gradients (1e-10)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.graph.fusion.pairs import assert_fused, both, kinds, parse

SHAPE = (2, 3, 8)
SIGNATURE = "double[b,t,8] x", "double[b,t,8] y"


def inputs(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64), **more}


def weight(seed: int = 1, shape: tuple[int, ...] = (8,)) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


CENTRED = "m = ReduceMean<axes=[-1]>(x)\nc = Sub(x, m)\n"
SQUARED = "s = Pow(c, two)\nv = ReduceMean<axes=[-1]>(s)\ne = Add(v, eps)\n"
AFFINE = "\ns1 = Mul(n, w)\ny = Add(s1, b)"
LAYER = {
    "root and quotient": f"{CENTRED}{SQUARED}r = Sqrt(e)\nn = Div(c, r){AFFINE}",
    "reciprocal of the root": f"{CENTRED}{SQUARED}r = Sqrt(e)\ni = Reciprocal(r)\nn = Mul(i, c){AFFINE}",
    "one divided by the root": f"{CENTRED}{SQUARED}r = Sqrt(e)\ni = Div(one, r)\nn = Mul(c, i){AFFINE}",
    "a power of one half": f"{CENTRED}{SQUARED}r = Pow(e, half)\nn = Div(c, r){AFFINE}",
    "a power of minus one half": f"{CENTRED}{SQUARED}r = Pow(e, minus_half)\nn = Mul(c, r){AFFINE}",
    "a product with itself": (
        f"{CENTRED}{SQUARED.replace('Pow(c, two)', 'Mul(c, c)')}r = Sqrt(e)\nn = Div(c, r){AFFINE}"
    ),
    "centred twice": (
        f"{CENTRED}{SQUARED}r = Sqrt(e)\nm2 = ReduceMean<axes=[-1]>(x)\nc2 = Sub(x, m2)\nn = Div(c2, r){AFFINE}"
    ),
    "the constant first": f"{CENTRED}{SQUARED.replace('Add(v, eps)', 'Add(eps, v)')}r = Sqrt(e)\nn = Div(c, r){AFFINE}",
    "without scale and shift": f"{CENTRED}{SQUARED}r = Sqrt(e)\ny = Div(c, r)",
    "shift alone": f"{CENTRED}{SQUARED}r = Sqrt(e)\nn = Div(c, r)\ny = Add(n, b)",
}
NUMBERS = {"two": 2.0, "half": 0.5, "minus_half": -0.5, "one": 1.0, "eps": 1e-5}


def used(body: str, stored: dict[str, Any]) -> dict[str, Any]:
    """Those of the tensors that a body reads."""
    words = body.replace("(", " ").replace(")", " ").replace(",", " ").split()
    return {name: value for name, value in stored.items() if name in words}


@pytest.mark.parametrize("form", LAYER, ids=list(LAYER))
def test_layer_normalization(form: str) -> None:
    body = LAYER[form]
    stored = used(body, {**NUMBERS, "w": weight(), "b": weight(2)})
    trained = tuple(name for name in ("w", "b") if name in stored)
    _, fused = assert_fused(parse(*SIGNATURE, body, stored, 17), inputs(), {"layer_normalization": 1}, trained)
    given = inputs()["x"]
    w, b = (torch.from_numpy(stored[n]) if n in stored else None for n in ("w", "b"))
    torch.testing.assert_close(fused(x=given), F.layer_norm(given, (8,), w, b, 1e-5), rtol=1e-10, atol=1e-10)


def test_layer_normalization_over_two_axes_and_axes_as_an_input() -> None:
    body = (
        "m = ReduceMean(x, axes)\nc = Sub(x, m)\ns = Mul(c, c)\nv = ReduceMean(s, axes)\ne = Add(v, eps)\nr = Sqrt(e)\n"
        "n = Div(c, r)\ns1 = Mul(n, w)\ny = Add(s1, b)"
    )
    stored = {"eps": 1e-5, "axes": np.array([1, 2]), "w": weight(1, (3, 8)), "b": weight(2, (3, 8))}
    two = parse("double[b,3,8] x", "double[b,3,8] y", body, stored)
    assert_fused(two, inputs(), {"layer_normalization": 1}, ("w", "b"))


RMS = {
    "reciprocal of the root": (
        "s = Pow(x, two)\nv = ReduceMean<axes=[2]>(s)\ne = Add(v, eps)\nr = Sqrt(e)\ni = Reciprocal(r)\n"
        "n = Mul(x, i)\ny = Mul(w, n)"
    ),
    "quotient": (
        "s = Mul(x, x)\nv = ReduceMean<axes=[-1]>(s)\ne = Add(v, eps)\nr = Sqrt(e)\nn = Div(x, r)\n"
        "y = Mul(n, w)"
    ),
    "scale of one plus a weight": (
        "s = Pow(x, two)\nv = ReduceMean<axes=[-1]>(s)\ne = Add(v, eps)\nr = Pow(e, minus_half)\n"
        "n = Mul(x, r)\nk = Add(w, one)\ny = Mul(n, k)"
    ),
    "without scale": "s = Pow(x, two)\nv = ReduceMean<axes=[-1]>(s)\ne = Add(v, eps)\nr = Sqrt(e)\ny = Div(x, r)",
}  # fmt: skip


@pytest.mark.parametrize("form", RMS, ids=list(RMS))
def test_rms_normalization(form: str) -> None:
    stored = used(RMS[form], {**NUMBERS, "w": weight()})
    trained = ("w",) if "w" in stored else ()
    assert_fused(parse(*SIGNATURE, RMS[form], stored, 17), inputs(), {"rms_normalization": 1}, trained)


NOT_NORMS = {
    "the deviation plus epsilon": (
        f"{CENTRED}s = Pow(c, two)\nv = ReduceMean<axes=[-1]>(s)\nr = Sqrt(v)\ne = Add(r, eps)\n"
        f"y = Div(c, e)"
    ),
    "over the first axis": (
        "m = ReduceMean<axes=[1]>(x)\nc = Sub(x, m)\ns = Pow(c, two)\nv = ReduceMean<axes=[1]>(s)\n"
        "e = Add(v, eps)\nr = Sqrt(e)\ny = Div(c, r)"
    ),
    "means over different axes": (
        "m = ReduceMean<axes=[1]>(x)\nc = Sub(x, m)\ns = Pow(c, two)\nv = ReduceMean<axes=[-1]>(s)\n"
        "e = Add(v, eps)\nr = Sqrt(e)\ny = Div(x, r)"
    ),
    "another numerator": (
        "s = Pow(x, two)\nv = ReduceMean<axes=[-1]>(s)\ne = Add(v, eps)\nr = Sqrt(e)\nz = Mul(x, two)\n"
        "y = Div(z, r)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", NOT_NORMS, ids=list(NOT_NORMS))
def test_what_is_no_norm_stays(form: str) -> None:
    _, fused = both(parse(*SIGNATURE, NOT_NORMS[form], used(NOT_NORMS[form], NUMBERS), 17))
    assert kinds(fused.graph) == {}


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


HALVES = (
    "x1 = Slice(x, i0, i4, last)\nx2 = Slice(x, i4, end, last)\nn = Neg(x2)\nr = Concat<axis=-1>(n, x1)\n"
    "a = Mul(x, cos)\nb = Mul(r, sin)\ny = Add(a, b)"
)
PAIRS = (
    "x1 = Slice(x, i0, end, last, i2)\nx2 = Slice(x, i1, end, last, i2)\nn = Neg(x2)\nu = Unsqueeze(n, last)\n"
    "w = Unsqueeze(x1, last)\nc = Concat<axis=-1>(u, w)\nr = Reshape(c, same)\na = Mul(x, cos)\n"
    "b = Mul(r, sin)\ny = Add(a, b)"
)
SPLIT = (
    "x1, x2 = Split<axis=-1>(x, i44)\nn = Neg(x2)\nr = Concat<axis=-1>(n, x1)\na = Mul(x, cos)\n"
    "b = Mul(r, sin)\ny = Add(b, a)"
)
ROTATED = "double[b,3,8] x, double[one,3,8] cos, double[one,3,8] sin"
PLACES = {
    "i0": np.array([0]), "i1": np.array([1]), "i2": np.array([2]), "i4": np.array([4]), "i44": np.array([4, 4]),
    "end": np.array([2**63 - 1]), "last": np.array([-1]), "same": np.array([0, 0, 8]),
}  # fmt: skip


@pytest.mark.parametrize("body", [HALVES, PAIRS, SPLIT], ids=["halves", "neighbors", "split"])
def test_rotary_embedding(body: str) -> None:
    """With tables that are not the same in both halves, and a gradient of the tables too."""
    model = parse(
        "double[b,3,8] x, double[one,3,8] cos, double[one,3,8] sin", "double[b,3,8] y", body, used(body, PLACES)
    )
    tables = {n: torch.from_numpy(weight(i, (1, 3, 8))) for i, n in enumerate(("cos", "sin"))}
    assert_fused(model, inputs(**tables), {"rotary_embedding": 1})


def test_a_rotation_with_the_wrong_sign_stays() -> None:
    body = HALVES.replace("Neg(x2)", "Neg(x1)").replace("Concat<axis=-1>(n, x1)", "Concat<axis=-1>(x2, n)")
    model = parse(
        "double[b,3,8] x, double[one,3,8] cos, double[one,3,8] sin", "double[b,3,8] y", body, used(body, PLACES)
    )
    _, fused = both(model)
    assert kinds(fused.graph) == {}
