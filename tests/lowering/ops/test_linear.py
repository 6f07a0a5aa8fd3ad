"""Matrix products: against numpy and onnxruntime at every version, gradients by finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onward.errors import NodeError
from tests.one_node import check_against_onnxruntime, check_gradients, make_model, run, to_array

RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape)


SHAPES = [((2, 3), (3, 4)), ((3,), (3, 4)), ((2, 3), (3,)), ((3,), (3,)), ((5, 1, 2, 3), (4, 3, 2)), ((3,), (2, 3, 2))]


@pytest.mark.parametrize(("a", "b"), SHAPES)
@pytest.mark.parametrize("opset", [1, 9, 13])
def test_matmul(a: tuple[int, ...], b: tuple[int, ...], opset: int) -> None:
    left, right = normal(*a), normal(*b)
    model = make_model("MatMul", {"a": left, "b": right}, opset=opset)
    np.testing.assert_allclose(to_array(run(model, left, right)), left @ right, rtol=1e-12)
    check_gradients(model, left, right)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint64])
def test_matmul_of_integers(dtype: type[np.generic]) -> None:
    left, right = (RANDOM.integers(0, 9, shape).astype(dtype) for shape in ((4, 2, 3), (3, 2)))
    actual = to_array(run(make_model("MatMul", {"a": left, "b": right}, opset=13), left, right))
    assert actual.dtype == left.dtype
    np.testing.assert_array_equal(actual, left @ right)


GEMMS: list[tuple[dict[str, Any], tuple[int, ...] | None]] = [
    ({}, (2, 4)),
    ({"transA": 1, "alpha": 0.5}, (4,)),
    ({"transB": 1, "beta": 2.0}, (2, 1)),
    ({"transA": 1, "transB": 1, "alpha": -1.5, "beta": 0.25}, (1, 1)),
    ({}, ()),
    ({"alpha": 2.0, "transB": 1}, None),
    ({}, None),
]


@pytest.mark.parametrize(("attributes", "c"), GEMMS)
@pytest.mark.parametrize("opset", [7, 9, 11, 13])
def test_gemm(attributes: dict[str, Any], c: tuple[int, ...] | None, opset: int) -> None:
    if c is None and opset < 11:
        pytest.skip("C may be left out from version 11 on")
    inputs: dict[str, Any] = {
        "a": normal(3, 2) if attributes.get("transA") else normal(2, 3),
        "b": normal(4, 3) if attributes.get("transB") else normal(3, 4),
        "c": None if c is None else normal(*c),
    }
    single = {name: None if value is None else np.array(value, np.float32) for name, value in inputs.items()}
    check_against_onnxruntime(
        make_model("Gemm", single, attributes, opset), *(v for v in single.values() if v is not None)
    )
    check_gradients(make_model("Gemm", inputs, attributes, opset), *(v for v in inputs.values() if v is not None))


@pytest.mark.parametrize("broadcast", [0, 1])
def test_gemm_6(broadcast: int) -> None:
    a, b, c = normal(2, 3), normal(3, 4), normal(4) if broadcast else normal(2, 4)
    model = make_model("Gemm", {"a": a, "b": b, "c": c}, {"broadcast": broadcast, "beta": 2.0}, 6)
    np.testing.assert_allclose(to_array(run(model, a, b, c)), a @ b + 2 * c, rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.int32, np.uint64])
def test_gemm_of_integers(dtype: type[np.generic]) -> None:
    a, b, c = (RANDOM.integers(0, 9, shape).astype(dtype) for shape in ((2, 3), (3, 4), (4,)))
    model = make_model("Gemm", {"a": a, "b": b, "c": c}, {"alpha": 2.0}, 13)
    actual = to_array(run(model, a, b, c))
    assert actual.dtype == a.dtype
    np.testing.assert_array_equal(actual, 2 * (a @ b) + c)


EQUATIONS = {
    "ij,jk->ik": ((2, 3), (3, 4)),
    "bij, bjk": ((2, 3, 2), (2, 2, 3)),
    "...ii->...i": ((2, 3, 3),),
    "i,j->ij": ((3,), (2,)),
    "ij->": ((2, 3),),
    "...ij,...kj->...ik": ((2, 2, 3), (4, 3)),
    "bqhd,bkhd->bhqk": ((1, 2, 2, 3), (1, 4, 2, 3)),
}


@pytest.mark.parametrize("equation", list(EQUATIONS))
def test_einsum(equation: str) -> None:
    arrays = {f"x{i}": normal(*shape) for i, shape in enumerate(EQUATIONS[equation])}
    model = make_model("Einsum", arrays, {"equation": equation}, 12)
    expected = np.einsum(equation, *arrays.values())
    np.testing.assert_allclose(to_array(run(model, *arrays.values())), expected, rtol=1e-12)
    check_gradients(model, *arrays.values())


@pytest.mark.parametrize("shape", [(2, 2), (2, 3, 3), (1, 1)])
def test_det(shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    model = make_model("Det", {"x": x}, opset=11)
    np.testing.assert_allclose(to_array(run(model, x)), np.linalg.det(x), rtol=1e-12)
    check_gradients(model, x)


def test_gemm_wants_matrices() -> None:
    a, b = normal(2, 2, 3), normal(3, 4)
    with pytest.raises(NodeError, match="Gemm multiplies matrices; got ranks 3 and 2"):
        run(make_model("Gemm", {"a": a, "b": b}, opset=13), a, b)
