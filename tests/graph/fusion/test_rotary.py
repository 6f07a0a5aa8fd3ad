"""Rotary embedding written out becomes one call with the same values and gradients (1e-10)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.graph.fusion.pairs import assert_fused, both, kinds, parse
from tests.graph.fusion.written_out import (
    inputs,
    used,
    weight,
)

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
