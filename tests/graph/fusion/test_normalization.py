"""Norms written out become one call with the same values and gradients (1e-10)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.graph.fusion.pairs import assert_fused, both, kinds, parse
from tests.graph.fusion.written_out import (
    SIGNATURE,
    inputs,
    used,
    weight,
)

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


STANDARD = (
    "w = Reshape(weight, flat)\nm = ReduceMean<keepdims=0>(w, axes)\nm2 = ReduceMean(w, axes)\nc = Sub(w, m2)\n"
    "q = Mul(c, c)\nv = ReduceMean<keepdims=0>(q, axes)\nn = BatchNormalization<epsilon=1e-3>(w, ones, zeros, m, v)\n"
    "k = Reshape(n, kernel)\ny = Conv(x, k)"
)
OF_WEIGHTS = {
    "weight": np.random.default_rng(4).normal(size=(5, 3, 2, 2)), "flat": np.array([1, 5, -1]),
    "kernel": np.array([5, 3, 2, 2]), "axes": np.array([0, 2]), "ones": np.ones(5), "zeros": np.zeros(5),
}  # fmt: skip


def test_weights_that_are_standardized() -> None:
    """As timm and BiT have them, by `batch_norm` without running statistics."""
    model = parse("double[b,3,4,4] x", "double[b,5,h,w] y", STANDARD, OF_WEIGHTS)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    _, fused = assert_fused(model, {"x": x}, {"layer_normalization": 1}, ("weight",))
    weight = torch.from_numpy(OF_WEIGHTS["weight"])
    standard = F.batch_norm(weight.reshape(1, 5, -1), None, None, training=True, eps=float(np.float32(1e-3)))
    torch.testing.assert_close(fused(x).detach(), F.conv2d(x, standard.view_as(weight)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Mul(c, c)", "Mul(c, w)"),
        ("c = Sub(w, m2)", "h = Neg(w)\nc = Sub(h, m2)"),
        ("m = ReduceMean<keepdims=0>(w, axes)", "h = Neg(w)\nm = ReduceMean<keepdims=0>(h, axes)"),
        ("(w, ones, zeros,", "(w, ones, ones,"),
    ],
)
def test_weights_that_are_normalized_otherwise_stay(old: str, new: str) -> None:
    model = parse("double[b,3,4,4] x", "double[b,5,h,w] y", STANDARD.replace(old, new), OF_WEIGHTS)
    assert_fused(model, {"x": torch.randn(2, 3, 4, 4, dtype=torch.float64)}, {}, ("weight",))


ROTATED = "double[b,3,8] x, double[one,3,8] cos, double[one,3,8] sin"
