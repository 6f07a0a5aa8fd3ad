"""Arithmetic as a polynomial: however it is bracketed, and what is none of low degree."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from onward.graph.fusion.polynomial import Polynomial, is_close, polynomial, reached
from onward.graph.nodes.known_values import KnownValues

CONSTANTS = "float two = {2}, float three = {3}, float half = {0.5}, float zero = {0}, float four = {4}"


def read(body: str) -> tuple[KnownValues, ir.Value, list[ir.Value]]:
    text = f'<ir_version: 8, opset_import: ["": 18]> g (float[3] x, float[3] z) => (y) <{CONSTANTS}> {{ {body} }}'
    model = ir.from_proto(onnx.parser.parse_model(text))
    return KnownValues(model, []), model.graph.outputs[0], list(model.graph.inputs)


def found(body: str) -> Polynomial | None:
    return polynomial(*read(body))


@pytest.mark.parametrize(
    "body",
    [
        "a = Mul(x, z) b = Add(a, two) y = Mul(b, half)",
        "a = Mul(z, half) b = Mul(x, a) c = Div(two, two) y = Add(c, b)",
        "a = Neg(x) b = Mul(a, z) c = Sub(two, b) y = Div(c, two)",
        "i = Identity(x) a = Mul(half, i) b = Mul(a, z) o = Mul(half, two) y = Add(b, o)",
    ],
)
def test_however_it_is_bracketed(body: str) -> None:
    assert is_close(found(body), {(1, 1): 0.5, (0, 0): 1.0}, 1e-12)


def test_powers_and_terms_that_cancel() -> None:
    assert is_close(found("a = Add(x, three) y = Pow(a, two)"), {(2, 0): 1.0, (1, 0): 6.0, (0, 0): 9.0}, 1e-12)
    assert is_close(found("a = Add(x, z) y = Sub(a, z)"), {(1, 0): 1.0}, 1e-12)
    assert not is_close({(1,): 1.001}, {(1,): 1.0}, 1e-6)
    assert not is_close({(1,): 1.0, (0,): 0.1}, {(1,): 1.0}, 1e-6)
    assert not is_close(None, {(1,): 1.0}, 1e-6)


@pytest.mark.parametrize(
    "body",
    [
        "y = Relu(x)", "y = Div(x, zero)", "y = Div(two, x)", "y = Pow(x, z)", "y = Pow(x, half)", "y = Pow(x, four)",
        "a = Pow(x, three) b = Pow(z, three) c = Mul(a, b) y = Mul(c, a)",
    ],
)  # fmt: skip
def test_what_is_none(body: str) -> None:
    assert found(body) is None


def test_chains_that_are_too_deep() -> None:
    body = " ".join(f"a{number + 1} = Add(a{number}, two)" for number in range(9))
    assert found(f"a0 = Add(x, two) {body} y = Neg(a9)") is None


def test_nodes_that_it_is_made_of() -> None:
    facts, value, variables = read("a = Mul(x, two) b = Add(a, a) k = Add(two, two) y = Add(b, k)")
    assert [node.outputs[0].name for node in reached(facts, value, variables)] == ["a", "b", "y"]
    assert reached(facts, variables[0], variables) == []
