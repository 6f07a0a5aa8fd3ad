"""The two products of attention as `Einsum`: letters in any order, and equations that are none."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onward.graph.fusion.einsum import read_probability_product, read_score_product

A, B = ir.Value(name="a"), ir.Value(name="b")
SIZES = {"b": 2, "h": 3, "q": 4, "k": 5, "d": 6}


def einsum(equation: str, *inputs: ir.Value) -> ir.Node:
    return ir.node("Einsum", list(inputs or (A, B)), attributes={"equation": equation})


def draw(letters: str, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=[SIZES[letter] for letter in letters])


def ordered(array: np.ndarray, order: tuple[int, ...] | None) -> np.ndarray:
    return array if order is None else array.transpose(order)


@pytest.mark.parametrize("equation", ["bhqd,bhkd->bhqk", "bqhd,bkhd->bhqk", "bkhd,bqhd -> bhqk", "bqd,bkd->bqk"])
def test_scores(equation: str) -> None:
    found = read_score_product(einsum(equation))
    assert found is not None
    terms, result = equation.replace(" ", "").split("->")
    arrays = dict(zip((A, B), (draw(term, seed) for seed, term in enumerate(terms.split(","))), strict=True))
    (first, order), (second, other) = found
    product = ordered(arrays[first], order) @ ordered(arrays[second], other).swapaxes(-1, -2)
    np.testing.assert_allclose(product, np.einsum(equation.replace(" ", ""), arrays[A], arrays[B]))
    assert product.shape == tuple(SIZES[letter] for letter in result)


@pytest.mark.parametrize("equation", ["bhqk,bhkd->bhqd", "bhqk,bkhd->bqhd", "bqk,bkd->bqd", "bhqk,bhdk->bqhd"])
def test_probabilities_times_values(equation: str) -> None:
    found = read_probability_product(einsum(equation))
    assert found is not None
    left, right = (draw(term, seed) for seed, term in enumerate(equation.partition("->")[0].split(",")))
    (values, order), after = found
    assert values is B
    product = ordered(left @ ordered(right, order), after)
    np.testing.assert_allclose(product, np.einsum(equation, left, right))


@pytest.mark.parametrize(
    "equation",
    ["bhqd,bhkd", "...qd,...kd->...qk", "bhqd,bhkd,q->bhqk", "bhqq,bhkd->bhqk", "qd,kd->qk", "bhqd,bhkd->bhqd", ""],
)
def test_other_equations(equation: str) -> None:
    assert read_score_product(einsum(equation)) is None


def test_what_is_no_product_of_two_values() -> None:
    assert read_score_product(einsum("bqd,bkd->bqk", A, A)) is None
    assert read_score_product(einsum("bqd->bqd", A)) is None
    assert read_probability_product(einsum("bqk,bqd->bqd")) is None
    assert read_probability_product(einsum("bqk,bkd->bkd")) is None
