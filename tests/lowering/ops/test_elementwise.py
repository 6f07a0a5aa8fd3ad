"""Arithmetic: gradients by finite differences, values against numpy and onnxruntime, every version's meaning."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onward.errors import ModelError
from tests.one_node import check_against_onnxruntime, check_gradients, make_model, run, to_array

RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape)


def positive(*shape: int) -> np.ndarray:
    return RANDOM.uniform(0.3, 2.0, shape)


BINARY = [
    ("Add", normal(2, 3), normal(3), 7),
    ("Add", normal(2, 1), normal(1, 3), 14),
    ("Sub", normal(2, 3), normal(), 14),
    ("Mul", normal(4, 1, 3), normal(2, 3), 13),
    ("Div", normal(2, 3), positive(2, 1), 14),
    ("Pow", positive(2, 3), normal(3), 15),
    ("Pow", positive(2, 3), np.array(3.0), 12),
    ("Mod", normal(2, 3) * 3, positive(3), 28),
    ("Max", normal(2, 3), normal(3), 13),
    ("Min", normal(2, 3), normal(2, 3), 8),
    ("Sum", normal(2, 3), normal(3), 8),
    ("Mean", normal(2, 3), normal(3), 13),
]


@pytest.mark.parametrize(("op_type", "a", "b", "opset"), BINARY, ids=[f"{b[0]}-{b[3]}" for b in BINARY])
def test_binary_gradients(op_type: str, a: np.ndarray, b: np.ndarray, opset: int) -> None:
    attributes = {"fmod": 1} if op_type == "Mod" else {}
    check_gradients(make_model(op_type, {"A": a, "B": b}, attributes, opset), a, b)


UNARY = [
    ("Neg", normal(5), 13),
    ("Abs", normal(5), 13),
    ("Reciprocal", positive(5), 13),
    ("Sqrt", positive(5), 13),
    ("Exp", normal(5), 13),
    ("Log", positive(5), 13),
    ("Erf", normal(5), 13),
    ("Floor", normal(5), 13),
    ("Ceil", normal(5), 13),
    ("Round", normal(5), 22),
    ("Sign", normal(5), 13),
    ("Sin", normal(5), 22),
    ("Cos", normal(5), 22),
    ("Tan", normal(5), 22),
    ("Asin", RANDOM.uniform(-0.9, 0.9, 5), 22),
    ("Acos", RANDOM.uniform(-0.9, 0.9, 5), 22),
    ("Atan", normal(5), 22),
    ("Sinh", normal(5), 22),
    ("Cosh", normal(5), 22),
    ("Asinh", normal(5), 22),
    ("Acosh", RANDOM.uniform(1.2, 3, 5), 22),
    ("Atanh", RANDOM.uniform(-0.9, 0.9, 5), 22),
]


@pytest.mark.parametrize(("op_type", "x", "opset"), UNARY, ids=[u[0] for u in UNARY])
def test_unary_gradients_and_values(op_type: str, x: np.ndarray, opset: int) -> None:
    check_gradients(make_model(op_type, {"X": x}, {}, opset), x)
    single = x.astype(np.float32)
    check_against_onnxruntime(make_model(op_type, {"X": single}, {}, opset), single, rtol=1e-5, atol=1e-6)


def test_gradient_of_abs_at_zero_is_zero() -> None:
    x = torch.zeros(3, requires_grad=True)
    run(make_model("Abs", {"X": x}), x).sum().backward()
    assert torch.equal(x.grad, torch.zeros(3))


def test_pow_of_zero_has_finite_gradients() -> None:
    """x**2 and x**1 at x = 0, exponent as a tensor and as a constant: torch's own rule 0 * log 0 = 0."""
    for exponent in (2.0, 1.0):
        x = torch.zeros(2, requires_grad=True)
        y = torch.full((2,), exponent, requires_grad=True)
        run(make_model("Pow", {"X": x, "Y": y}, {}, 15), x, y).sum().backward()
        assert torch.equal(x.grad, torch.full((2,), 1.0 if exponent == 1 else 0.0))
        assert torch.equal(y.grad, torch.zeros(2))
        x = torch.zeros(2, requires_grad=True)
        constant = make_model("Pow", {"X": x, "Y": None}, {}, 15, initializers={"Y": np.float32(exponent)})
        run(constant, x).sum().backward()
        assert torch.equal(x.grad, torch.full((2,), 1.0 if exponent == 1 else 0.0))


def test_ties_of_max_share_the_gradient() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = torch.tensor([1.0, 1.0], requires_grad=True)
    run(make_model("Max", {"X": x, "Y": y}), x, y).sum().backward()
    assert x.grad.tolist() == [0.5, 1.0]
    assert y.grad.tolist() == [0.5, 0.0]


@pytest.mark.parametrize(("op_type", "bound"), [("Max", 0.0), ("Min", 0.0), ("Max", 1.5)])
def test_a_bound_takes_no_share_of_the_gradient(op_type: str, bound: float) -> None:
    """torch exports `clamp(x, min=bound)` as a Max with a number: the gradient is that of the clamp."""
    x = torch.tensor([-1.0, -0.0, 0.0, 1.5, 2.0], requires_grad=True)
    model = make_model(op_type, {"X": x, "Y": None}, {}, 18, initializers={"Y": np.float32(bound)})
    own = x.detach().clone().requires_grad_()
    found = run(model, x)
    expected = torch.clamp(own, min=bound) if op_type == "Max" else torch.clamp(own, max=bound)
    found.sum().backward()
    expected.sum().backward()
    assert torch.equal(found, expected)
    assert torch.equal(x.grad, own.grad)


INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]


def _extremes(dtype: type) -> tuple[np.ndarray, np.ndarray]:
    info = np.iinfo(dtype)
    a = np.array([info.min, info.max, info.max - 1, 7, 0, info.max, info.max // 2 + 1, 100], dtype=dtype)
    b = np.array([3, info.max, 2, 2, 5, 1, 3, info.max // 2 + 2], dtype=dtype)
    return a, b


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda d: d.__name__)
def test_integers_of_every_width_at_their_limits(dtype: type) -> None:
    """Wrap-around, truncating division, remainders and order, for all eight integer types, against numpy."""
    a, b = _extremes(dtype)
    quotient = [abs(int(p)) // abs(int(q)) * (1 if (p < 0) == (q < 0) else -1) for p, q in zip(a, b, strict=True)]
    with np.errstate(over="ignore"):
        expected = {
            "Add": a + b,
            "Sub": a - b,
            "Mul": a * b,
            "Div": np.array(quotient, dtype=dtype),
            "Mod": a % b,
            "Max": np.maximum(a, b),
            "Min": np.minimum(a, b),
            "Equal": a == b,
            "Greater": a > b,
            "LessOrEqual": a <= b,
        }
    for op_type, values in expected.items():
        result = to_array(run(make_model(op_type, {"A": a, "B": b}, {}, 16), a, b))
        assert result.dtype == values.dtype, op_type
        np.testing.assert_array_equal(result, values, err_msg=op_type)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64, np.int64], ids=lambda d: d.__name__)
def test_constants_of_one_element_beside_integers(dtype: type) -> None:
    """A constant arrives as a number; the result is as with a tensor, from either side and at the type's limit."""
    a, _ = _extremes(dtype)
    largest = np.array(np.iinfo(dtype).max, dtype=dtype)
    for op_type in ("Add", "Sub", "Mul", "Div", "Greater", "Equal"):
        reference = run(make_model(op_type, {"A": a, "B": largest}, {}, 14), a, largest)
        constant = run(make_model(op_type, {"A": a, "B": None}, {}, 14, initializers={"B": largest}), a)
        assert torch.equal(reference, constant), op_type
    first = run(make_model("Sub", {"A": None, "B": a}, {}, 14, initializers={"A": largest}), a)
    np.testing.assert_array_equal(to_array(first), largest - a)


def test_constants_keep_shape_and_type() -> None:
    """A one-element constant of higher rank still raises the rank; two constants still give a tensor."""
    x = np.float32(2.0)
    result = run(make_model("Mul", {"A": x, "B": None}, {}, 14, initializers={"B": np.full((1, 1), 3, np.float32)}), x)
    assert result.shape == (1, 1)
    both = make_model("Add", {"A": None, "B": None}, {}, 14, initializers={"A": np.float32(1), "B": np.float32(2)})
    assert run(both).dtype == torch.float32
    assert run(both).item() == 3.0
    half = np.array([1, 2], np.float16)
    result = run(make_model("Div", {"A": None, "B": half}, {}, 14, initializers={"A": np.float16(3)}), half)
    assert result.dtype == torch.float16
    assert result.tolist() == [3.0, 1.5]


def test_pow_takes_the_type_of_its_base() -> None:
    """Mixed types: float to integer powers exactly, integers to fractional powers cut to integers."""
    cases = [
        (np.array([2, 3], np.int64), np.array([0.5, 2.0], np.float32), [1, 9]),
        (np.array([1.5, 2.0], np.float32), np.array([2, 3], np.uint64), [2.25, 8.0]),
        (np.array([2, 3], np.int32), np.array([3, 2], np.int64), [8, 9]),
    ]
    for x, y, expected in cases:
        result = run(make_model("Pow", {"X": x, "Y": y}, {}, 15), x, y)
        assert to_array(result).dtype == x.dtype
        assert result.tolist() == expected
    x = np.array([2, 3], np.int64)
    constant = run(make_model("Pow", {"X": x, "Y": None}, {}, 15, initializers={"Y": np.float32(0.5)}), x)
    assert constant.tolist() == [1, 1]


def test_mod_follows_the_sign_of_divisor_or_dividend() -> None:
    a, b = np.array([-4.3, 7.2, 5.0, -5.0], np.float32), np.array([2.1, -3.4, np.inf, np.inf], np.float32)
    floored = run(make_model("Mod", {"A": a, "B": b}, {"fmod": 0}, 28), a, b)
    np.testing.assert_allclose(floored, [2.0, -3.0, 5.0, np.inf], rtol=1e-5)
    truncated = run(make_model("Mod", {"A": a, "B": b}, {"fmod": 1}, 13), a, b)
    np.testing.assert_allclose(truncated, np.fmod(a, b), rtol=1e-6)
    integers = np.array([-7, 7], np.int32), np.array([3, -3], np.int32)
    model = make_model("Mod", {"A": integers[0], "B": integers[1]}, {"fmod": 1}, 13)
    assert run(model, *integers).tolist() == [-1, 1]


def test_broadcasting_by_attribute_before_opset_7() -> None:
    """B is at `axis` of A, or at its end; shapes from the text of Add-6."""
    a = normal(2, 3, 4, 5)
    for shape, axis, expected in [
        ((), None, ()),
        ((5,), None, (5,)),
        ((4, 5), None, (4, 5)),
        ((3, 4), 1, (3, 4, 1)),
        ((2,), 0, (2, 1, 1, 1)),
        ((1, 1), None, (1, 1)),
    ]:
        b = positive(*shape)
        attributes = {"broadcast": 1} | ({} if axis is None else {"axis": axis})
        for op_type, function in (("Add", np.add), ("Sub", np.subtract), ("Mul", np.multiply), ("Div", np.divide)):
            for opset in (5, 6):
                result = run(make_model(op_type, {"A": a, "B": b}, attributes, opset), a, b)
                np.testing.assert_allclose(result, function(a, b.reshape(expected)), rtol=1e-12)
    result = run(make_model("Pow", {"X": np.abs(a), "Y": positive(3, 4)}, {"broadcast": 1, "axis": 1}, 6), np.abs(a), b)
    assert result.shape == a.shape


def test_shapes_must_agree_before_opset_7_without_broadcast() -> None:
    a, b = normal(2, 3), normal(3)
    with pytest.raises(ModelError, match=r"node 'node' \(Add\).*shapes \[2, 3\] and \[3\] differ, and broadcast is 0"):
        run(make_model("Add", {"A": a, "B": b}, {}, 6), a, b)


def test_hint_consumed_inputs_changes_nothing() -> None:
    x = normal(3)
    for op_type in ("Abs", "Neg", "Exp", "Sqrt", "Relu", "Tanh", "Sigmoid", "Elu"):
        given = np.abs(x)
        new = run(make_model(op_type, {"X": given}, {}, 13), given)
        old = run(make_model(op_type, {"X": given}, {"consumed_inputs": [0]}, 1), given)
        assert torch.equal(new, old)


CLIPS = [
    ({"min": -0.5, "max": 0.7}, (-0.5, 0.7)),
    ({"min": -0.5}, (-0.5, None)),
    ({"max": 0.7}, (None, 0.7)),
    ({}, (None, None)),
]


@pytest.mark.parametrize(("attributes", "bounds"), CLIPS)
def test_clip_in_every_form(attributes: dict[str, float], bounds: tuple) -> None:
    """Attributes up to opset 6, inputs from 11 on, as tensors and as constants: one meaning, one gradient."""
    x = normal(20).astype(np.float32)
    expected = np.clip(x, -np.inf if bounds[0] is None else bounds[0], np.inf if bounds[1] is None else bounds[1])
    given = {
        name: None if bound is None else np.float32(bound) for name, bound in zip(("min", "max"), bounds, strict=True)
    }
    tensors = [bound for bound in given.values() if bound is not None]
    constants = {name: bound for name, bound in given.items() if bound is not None}
    models = [
        (make_model("Clip", {"input": x}, attributes, 1), ()),
        (make_model("Clip", {"input": x}, attributes, 6), ()),
        (make_model("Clip", {"input": x, **given}, {}, 11), tensors),
        (make_model("Clip", {"input": x, **given}, {}, 13, initializers=constants), ()),
    ]
    for model, further in models:
        variable = torch.tensor(x, requires_grad=True)
        result = run(model, variable, *further)
        np.testing.assert_array_equal(result.detach(), expected)
        result.sum().backward()
        np.testing.assert_array_equal(variable.grad, (expected == x).astype(np.float32))


def test_clip_with_min_above_max_gives_max() -> None:
    x = np.array([-2, 0, 6], np.float32)
    low, high = np.float32(2), np.float32(1)
    assert run(make_model("Clip", {"input": x, "min": low, "max": high}, {}, 13), x, low, high).tolist() == [1, 1, 1]
    x = np.array([0, 2**63, 2**64 - 1], np.uint64)
    low, high = np.uint64(5), np.uint64(2**63 + 1)
    model = make_model("Clip", {"input": x, "min": low, "max": None}, {}, 13, initializers={"max": high})
    assert to_array(run(model, x, low)).tolist() == [5, 2**63, 2**63 + 1]


def test_clip_passes_gradients_to_its_bounds() -> None:
    x, low, high = normal(6), np.array(-0.4), np.array(0.3)
    check_gradients(make_model("Clip", {"input": x, "min": low, "max": high}, {}, 13), x, low, high)


def test_round_takes_halves_to_the_even_neighbour() -> None:
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 2.3], np.float32)
    assert run(make_model("Round", {"X": x}, {}, 11), x).tolist() == [0.0, 2.0, 2.0, -0.0, -2.0, 2.0]


@pytest.mark.parametrize("op_type", ["CumSum", "CumProd"])
@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
def test_running_sums_and_products(op_type: str, exclusive: int, reverse: int) -> None:
    x = normal(3, 4)
    x[1, 1] = 0.0
    accumulate, neutral = (np.cumsum, 0.0) if op_type == "CumSum" else (np.cumprod, 1.0)
    for axis in (0, 1, -1):
        y = np.flip(x, axis) if reverse else x
        if exclusive:
            y = np.insert(np.delete(y, -1, axis), 0, neutral, axis)
        expected = accumulate(y, axis)
        expected = np.flip(expected, axis) if reverse else expected
        attributes = {"exclusive": exclusive, "reverse": reverse}
        model = make_model(op_type, {"x": x, "axis": None}, attributes, 28, initializers={"axis": np.array(axis)})
        np.testing.assert_allclose(run(model, x), expected, rtol=1e-12)
        check_gradients(model, x)


def test_axis_of_running_sums_out_of_range() -> None:
    x = normal(3, 4)
    model = make_model("CumSum", {"x": x, "axis": None}, {}, 14, initializers={"axis": np.array(2)})
    with pytest.raises(ModelError, match=r"axis 2 is out of range for a tensor of rank 2"):
        run(model, x)


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda d: d.__name__)
def test_shifts_by_any_amount(dtype: type) -> None:
    """Within the width as Python shifts, reduced to the width; beyond it or negative: only the sign's fill is left."""
    info = np.iinfo(dtype)
    width = info.bits
    x = np.array([info.max, info.min, 5, info.max // 3, -3 if info.min < 0 else 3], dtype=dtype)
    amounts = [0, 1, width - 1, width, 2 * width] + ([-1] if info.min < 0 else [])
    for amount in amounts:
        y = np.full_like(x, amount) if amount <= info.max else None
        assert y is not None
        inside = 0 <= amount < width
        left = [(int(v) << amount) % 2**width if inside else 0 for v in x]
        left = [v - 2**width if v > info.max else v for v in left]
        right = [int(v) >> amount if inside else (-1 if v < 0 else 0) for v in x]
        for direction, expected in (("LEFT", left), ("RIGHT", right)):
            model = make_model("BitShift", {"X": x, "Y": y}, {"direction": direction}, 28)
            assert to_array(run(model, x, y)).tolist() == expected, (direction, amount)


def test_direction_of_a_shift_is_left_or_right() -> None:
    x = np.array([1], np.uint8)
    with pytest.raises(ModelError, match="direction is 'UP'; it must be LEFT or RIGHT"):
        run(make_model("BitShift", {"X": x, "Y": x}, {"direction": "UP"}, 11), x, x)


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda d: d.__name__)
def test_bitwise_logic(dtype: type) -> None:
    a, b = _extremes(dtype)
    for op_type, expected in (("BitwiseAnd", a & b), ("BitwiseOr", a | b), ("BitwiseXor", a ^ b)):
        np.testing.assert_array_equal(to_array(run(make_model(op_type, {"A": a, "B": b}, {}, 18), a, b)), expected)
    np.testing.assert_array_equal(to_array(run(make_model("BitwiseNot", {"X": a}, {}, 18), a)), ~a)


@pytest.mark.parametrize("stored", [{}, {"min"}, {"max"}, {"min", "max"}])
def test_a_bound_is_one_number_computed_or_stored(stored: set[str]) -> None:
    """Written as a one-element tensor it is found, too; it does not give its rank to the result."""
    x = np.array(3, np.int64)
    bounds = {"min": np.array([[4]]), "max": np.array([5])}
    given = {name: value for name, value in bounds.items() if name not in stored}
    kept = {name: bounds[name] for name in stored}
    result = run(make_model("Clip", {"x": x, **dict.fromkeys(bounds), **given}, {}, 13, 1, kept), x, *given.values())
    assert (result.shape, result.item()) == ((), 4)
    for name, value in bounds.items():
        wrong = np.concatenate([value, value])
        inputs = {"x": x, "min": None, name: None if name in stored else wrong}
        model = make_model("Clip", inputs, {}, 13, initializers={name: wrong} if name in stored else {})
        with pytest.raises(ModelError, match="a bound must be a scalar; it has 2 elements"):
            run(model, *[value for value in inputs.values() if value is not None])
