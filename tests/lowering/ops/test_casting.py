"""Casts: every type against ml_dtypes and the tables of the standard's text; bits against numpy's views."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from onnx import TensorProto

from onward.errors import ModelError
from tests.one_node import check_gradients, make_model, run, to_array

NAN, INF = float("nan"), float("inf")
FLOAT8 = {
    TensorProto.FLOAT8E4M3FN: (ml_dtypes.float8_e4m3fn, False),
    TensorProto.FLOAT8E4M3FNUZ: (ml_dtypes.float8_e4m3fnuz, False),
    TensorProto.FLOAT8E5M2: (ml_dtypes.float8_e5m2, True),
    TensorProto.FLOAT8E5M2FNUZ: (ml_dtypes.float8_e5m2fnuz, False),
}
"""Type -> its numpy type, whether it has infinities."""


@pytest.mark.parametrize("target", FLOAT8)
@pytest.mark.parametrize("source", [np.float16, np.float32, np.float64], ids=lambda d: d.__name__)
def test_float8_saturates_or_overflows(target: int, source: type) -> None:
    """Rounds as ml_dtypes does over the whole range; beyond it the tables in the text of Cast-19."""
    dtype, has_infinity = FLOAT8[target]
    largest = float(ml_dtypes.finfo(dtype).max)
    inside = np.concatenate([np.linspace(-largest, largest, 997), np.geomspace(1e-6, largest, 499)]).astype(source)
    inside = inside[np.isfinite(inside)]
    beyond = np.array([largest * 1.5, -largest * 1.5, INF, -INF])
    beyond = beyond[np.isinf(beyond) | (np.abs(beyond) <= np.finfo(source).max)].astype(source)
    x = np.concatenate([inside, beyond, np.array([NAN], source)])
    for opset, saturate in itertools.product((19, 28), (0, 1)):
        model = make_model("Cast", {"x": x}, {"to": target, "saturate": saturate}, opset)
        result = run(model, x).to(torch.float64).numpy()
        np.testing.assert_array_equal(result[: len(inside)], inside.astype(dtype).astype(np.float64))
        signs = np.sign(beyond)
        expected = signs * largest if saturate else signs * (INF if has_infinity else NAN)
        np.testing.assert_array_equal(result[len(inside) : -1], expected)
        assert np.isnan(result[-1])


def test_values_that_just_round_to_the_largest_float8_do_not_overflow() -> None:
    x = np.array([448, 464, 465], np.float32)
    result = run(make_model("Cast", {"x": x}, {"to": TensorProto.FLOAT8E4M3FN, "saturate": 0}, 19), x)
    assert result.float()[:2].tolist() == [448.0, 448.0]
    assert torch.isnan(result.float()[2])


SMALL_FLOATS = {
    TensorProto.FLOAT4E2M1: ml_dtypes.float4_e2m1fn,
    TensorProto.FLOAT6E2M3: ml_dtypes.float6_e2m3fn,
    TensorProto.FLOAT6E3M2: ml_dtypes.float6_e3m2fn,
}


@pytest.mark.parametrize("target", SMALL_FLOATS)
def test_floats_of_4_and_6_bits(target: int) -> None:
    """Ties to even and saturation as ml_dtypes, over a grid finer than the type's own."""
    x = np.concatenate([np.arange(-40, 40, 1 / 64), [INF, -INF, 1e-6]]).astype(np.float32)
    result = run(make_model("Cast", {"x": x}, {"to": target}, 28), x).float().numpy()
    np.testing.assert_array_equal(result, x.astype(SMALL_FLOATS[target]).astype(np.float32))


def _power_of_two(value: float, mode: str) -> float:
    """The rounding that the text describes, in exact arithmetic."""
    exponent = np.floor(np.log2(value))
    lower, upper = 2.0**exponent, 2.0 ** (exponent + 1)
    if value == lower or mode == "down":
        return lower
    return upper if mode == "up" or value - lower >= upper - value else lower


@pytest.mark.parametrize("mode", ["up", "down", "nearest"])
def test_float8e8m0_rounds_to_powers_of_two(mode: str) -> None:
    x = np.array([1.0, 1.2, 1.5, 1.7, 3.0, 1e-30, 0.3, 100.0, 2.0**-126, 1.4 * 2.0**-127, 2.0**-127], np.float32)
    model = make_model("Cast", {"x": x}, {"to": TensorProto.FLOAT8E8M0, "round_mode": mode}, 24)
    assert run(model, x).float().tolist() == [_power_of_two(float(v), mode) for v in x]


def test_float8e8m0_beyond_its_range() -> None:
    """The table of special values in the text of Cast-24."""
    x = np.array([0.0, NAN, INF, 3e38, 1e-40], np.float32)
    attributes = {"to": TensorProto.FLOAT8E8M0, "saturate": 1, "round_mode": "up"}
    saturated = run(make_model("Cast", {"x": x}, attributes, 24), x).view(torch.uint8).tolist()
    assert saturated == [0, 255, 254, 254, 0]
    attributes = {"to": TensorProto.FLOAT8E8M0, "saturate": 0, "round_mode": "nearest"}
    overflowed = run(make_model("Cast", {"x": x}, attributes, 24), x).view(torch.uint8).tolist()
    assert overflowed == [255, 255, 255, 255, 255]


def test_round_mode_is_checked() -> None:
    x = np.ones(1, np.float32)
    with pytest.raises(ModelError, match="round_mode is 'even'; it must be up, down or nearest"):
        run(make_model("Cast", {"x": x}, {"to": TensorProto.FLOAT8E8M0, "round_mode": "even"}, 24), x)


def test_integers_keep_their_low_bits() -> None:
    x = np.array([200, -1, 70000, 7, -9], np.int32)
    for target, dtype in (
        (TensorProto.INT8, np.int8),
        (TensorProto.UINT8, np.uint8),
        (TensorProto.INT16, np.int16),
        (TensorProto.UINT16, np.uint16),
        (TensorProto.UINT64, np.uint64),
    ):
        np.testing.assert_array_equal(
            to_array(run(make_model("Cast", {"x": x}, {"to": target}, 13), x)), x.astype(dtype)
        )
    for target, bits, signed in (
        (TensorProto.INT4, 4, True),
        (TensorProto.UINT4, 4, False),
        (TensorProto.INT2, 2, True),
        (TensorProto.UINT2, 2, False),
    ):
        low = x & (2**bits - 1)
        expected = np.where(signed & (low >= 2 ** (bits - 1)), low - 2**bits, low)
        assert run(make_model("Cast", {"x": x}, {"to": target}, 25), x).tolist() == expected.tolist()


def test_casts_to_and_from_bool_and_beyond_the_range_of_float16() -> None:
    x = np.array([0.0, -0.0, 0.5, NAN], np.float32)
    model = make_model("Cast", {"x": x}, {"to": TensorProto.BOOL}, 13)
    assert run(model, x).tolist() == [False, False, True, True]
    flags = np.array([True, False])
    model = make_model("Cast", {"x": flags}, {"to": TensorProto.FLOAT}, 13)
    assert run(model, flags).tolist() == [1.0, 0.0]
    large = np.array([70000, -70000], np.int64)
    model = make_model("Cast", {"x": large}, {"to": TensorProto.FLOAT16}, 13)
    assert run(model, large).tolist() == [INF, -INF]


def test_type_by_name_before_opset_6() -> None:
    x = np.array([1.7], np.float32)
    assert run(make_model("Cast", {"x": x}, {"to": "INT64"}, 1), x).tolist() == [1]
    assert run(make_model("Cast", {"x": x}, {"to": TensorProto.INT64}, 6), x).tolist() == [1]


def test_strings_are_refused() -> None:
    x = np.ones(1, np.float32)
    with pytest.raises(ModelError, match="attribute 'to' has element type STRING, which torch cannot hold"):
        run(make_model("Cast", {"x": x}, {"to": TensorProto.STRING}, 13), x)


def test_gradients_pass_through_casts_between_floats() -> None:
    x = np.random.default_rng(0).standard_normal(5)
    check_gradients(make_model("Cast", {"x": x}, {"to": TensorProto.DOUBLE}, 13), x)
    variable = torch.tensor(x, requires_grad=True)
    model = make_model("Cast", {"x": x}, {"to": TensorProto.FLOAT}, 13)
    run(model, variable).sum().backward()
    assert variable.grad.tolist() == [1.0] * 5


def test_cast_like_knows_types_that_torch_holds_alike() -> None:
    """int4 and int8 are both held in int8; the graph says which it is."""
    x = np.array([9.0, -9.0], np.float32)
    for dtype, expected in ((ml_dtypes.int4, [-7, 7]), (np.int8, [9, -9]), (np.float16, [9.0, -9.0])):
        like = np.zeros(1, dtype)
        model = make_model("CastLike", {"input": x, "target_type": None}, {}, 25, initializers={"target_type": like})
        assert run(model, x).tolist() == expected


def test_bits_are_read_as_another_type() -> None:
    x = np.array([1.0, -2.5, 0.0], np.float32)
    for value, target, dtype in (
        (x, TensorProto.INT32, np.int32),
        (x.astype(np.float64), TensorProto.UINT64, np.uint64),
        (x.astype(np.float16), TensorProto.UINT16, np.uint16),
        (np.array([-1, 127], np.int8), TensorProto.UINT8, np.uint8),
    ):
        result = to_array(run(make_model("BitCast", {"input": value}, {"to": target}, 26), value))
        np.testing.assert_array_equal(result, value.view(dtype))


def test_bits_of_4_bit_types() -> None:
    """The sixteen codes of float4e2m1, from the OCP formats: sign, two bits of exponent, one of mantissa."""
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values += [-v for v in values]
    codes = np.arange(16).astype(ml_dtypes.uint4)
    model = make_model("BitCast", {"input": None}, {"to": TensorProto.FLOAT4E2M1}, 26, initializers={"input": codes})
    floats = run(model)
    assert floats.float().tolist() == values
    stored = np.array(values, np.float32).astype(ml_dtypes.float4_e2m1fn)
    model = make_model("BitCast", {"input": None}, {"to": TensorProto.INT4}, 26, initializers={"input": stored})
    assert run(model).tolist() == [*range(8), *range(-8, 0)]
    model = make_model("BitCast", {"input": None}, {"to": TensorProto.INT4}, 26, initializers={"input": codes})
    assert run(model).tolist() == [*range(8), *range(-8, 0)]


def test_types_of_different_width_are_refused() -> None:
    x = np.ones(1, np.float32)
    with pytest.raises(ModelError, match="FLOAT has 32 bits and INT64 has 64"):
        run(make_model("BitCast", {"input": x}, {"to": TensorProto.INT64}, 26), x)
