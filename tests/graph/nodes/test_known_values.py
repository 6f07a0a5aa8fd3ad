"""What is known of values before a graph runs: numbers, sizes with the names of open dimensions, equal computations."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onward.graph.nodes.known_values import KnownValues


def facts(body: str, **tensors: object) -> tuple[KnownValues, dict[str, ir.Value]]:
    text = f'<ir_version: 8, opset_import: ["": 18]> g (float[n, 4, 6] x, float[2] w) => (y) {{ {body} }}'
    proto = onnx.parser.parse_model(text)
    for name, given in tensors.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(given), name))
    model = ir.from_proto(proto)
    values = {str(value.name): value for node in model.graph for value in node.outputs}
    return KnownValues(model, ["trained"]), values | {**model.graph.initializers} | {"x": model.graph.inputs[0]}


SEVEN, TWO, MINUS = np.array(7), np.array(2), np.array(-7)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = Add(a, b)", 9), ("y = Div(a, b)", 3), ("y = Div(m, b)", -3), ("y = Mul(m, b)", -14),
        ("y = Neg(m)", 7), ("y = Pow(a, b)", 49), ("y = Identity(a)", 7),
    ],
)  # fmt: skip
def test_integers_are_computed_as_onnx_does(body: str, expected: int) -> None:
    known, values = facts(body, a=SEVEN, b=TWO, m=MINUS)
    assert known.number(values["y"]) == expected
    assert known.numbers(values["y"]) == (expected,)


@pytest.mark.parametrize("body", ["y = Div(a, z)", "y = Pow(a, m)", "y = Add(a, x)", "y = Add(a, trained)"])
def test_what_has_no_number_says_nothing(body: str) -> None:
    known, values = facts(body, a=SEVEN, z=np.array(0), m=MINUS, trained=TWO)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert known.number(values["y"]) is None


def test_sizes_keep_the_names_of_open_dimensions() -> None:
    body = "s = Shape(x) f = Gather(s, zero) u = Unsqueeze(f, axes) y = Concat<axis = 0>(u, rest)"
    known, values = facts(body, zero=np.array(0), axes=np.array([0]), rest=np.array([24]))
    assert known.sizes(values["s"]) == ("n", 4, 6)
    assert known.sizes(values["y"]) == ("n", 24)
    assert known.numbers(values["y"]) is None
    assert known.number(values["f"]) is None
    assert known.rank(values["x"]) == 3
    parts, inner = facts("s = Shape<start = 1>(x) y = Slice(s, b, e)", b=np.array([0]), e=np.array([1]))
    assert parts.numbers(inner["y"]) == (4,)


def test_a_fixed_size_next_to_open_ones_is_a_number() -> None:
    """The scale of attention as torch's exporter writes it, for any batch: 1 / sqrt of a head's size."""
    body = "s = Shape(x) f = Gather(s, last) c = CastLike(f, x) r = Sqrt(c) y = Div(one, r)"
    known, values = facts(body, last=np.array([1]), one=np.ones(1, np.float32))
    assert known.number(values["y"]) == 0.5
    known, values = facts(body, last=np.array([0]), one=np.ones(1, np.float32))
    assert known.number(values["y"]) is None


def test_numbers_are_compared_as_exactly_as_their_type_holds_them() -> None:
    single, values = facts("y = Mul(x, k)", k=np.float32(0.1))
    assert single.is_number(values["k"], 0.1)
    assert not single.is_number(values["k"], 0.1000001)
    double, values = facts("y = Mul(x, k)", k=np.float64(np.float32(0.1)))
    assert not double.is_number(values["k"], 0.1)
    half, values = facts("y = Mul(x, k)", k=np.float16(0.1))
    assert half.is_number(values["k"], 0.1)
    assert not half.is_number(None, 0.1)


def test_values_that_are_computed_alike_share_a_signature() -> None:
    body = "a = Mul(x, k) b = Mul(x, k) c = Mul(x, j) d = Mul(x, l) r = RandomNormalLike(x) y = RandomNormalLike(x)"
    known, values = facts(body, k=np.float32(2), j=np.float32(3), l=np.float32(2))
    signatures = {name: known.signature(values[name]) for name in "abcdry"}
    assert signatures["a"] == signatures["b"] == signatures["d"]
    assert len({signatures[name] for name in "acry"}) == 4


@pytest.mark.parametrize(("number", "is_finite"), [(1.0, True), (np.inf, False), (-np.inf, False), (np.nan, False)])
def test_whether_numbers_are_finite(number: float, is_finite: bool) -> None:
    for dtype in (np.float16, np.float32, np.float64):
        known, values = facts("y = Add(x, a)", a=np.array([0, number], dtype))
        assert known.is_finite(values["a"]) is is_finite
        assert known.is_finite(values["a"]) is is_finite
