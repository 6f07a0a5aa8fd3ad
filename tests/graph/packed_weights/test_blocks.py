"""Blocked integers and 4-bit floats equal those of onnxruntime's quantizers, and NF4 its definition in QLoRA."""

from __future__ import annotations

from statistics import NormalDist

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from onnxruntime.capi._pybind_state import quantize_matmul_4bits, quantize_matmul_8bits, quantize_matmul_bnb4

from onward.graph.packed_weights.blocks import NF4, pack_nibbles, quantize_integers, quantize_nf4

RANDOM = np.random.default_rng(0)


def test_nf4_is_made_of_quantiles_as_in_appendix_e_of_qlora() -> None:
    offset = 0.9677083
    positive = [NormalDist().inv_cdf(p) for p in np.linspace(offset, 0.5, 9)[:-1]]
    negative = [-NormalDist().inv_cdf(p) for p in np.linspace(offset, 0.5, 8)[:-1]]
    values = np.sort([*positive, 0.0, *negative])
    np.testing.assert_allclose(NF4, values / values.max(), atol=2e-7)


@pytest.mark.parametrize(("rows", "columns"), [(48, 64), (7, 33)])
def test_nf4_codes_are_those_of_onnxruntime(rows: int, columns: int) -> None:
    weight = RANDOM.standard_normal((rows, columns)).astype(np.float32)
    packed, scales = np.zeros(-(-weight.size // 2), np.uint8), np.zeros(-(-weight.size // 16), np.float32)
    quantize_matmul_bnb4(packed, weight, scales, 16, 1, rows, columns)
    codes, own_scales = quantize_nf4(weight, 16)
    np.testing.assert_array_equal(own_scales, scales)
    np.testing.assert_array_equal(codes, packed)


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_are_those_of_onnxruntime(bits: int) -> None:
    rows, columns, block = 96, 40, 32  # K, N
    weight = RANDOM.standard_normal((rows, columns)).astype(np.float32)
    blocks, middle = rows // block, 2 ** (bits - 1)
    packed = np.zeros((columns, blocks, block * bits // 8), np.uint8)
    scales, points = np.zeros(columns * blocks, np.float32), np.zeros(columns * -(-blocks * bits // 8), np.uint8)
    quantize = quantize_matmul_4bits if bits == 4 else quantize_matmul_8bits
    quantize(packed, weight, scales, points, block, columns, rows, True)
    codes, own_scales = quantize_integers(weight, 0, block, bits)
    np.testing.assert_allclose(own_scales.T.reshape(-1), scales, rtol=1e-7)
    theirs = np.stack([packed & 15, packed >> 4], -1).reshape(columns, rows) if bits == 4 else packed
    theirs = theirs.reshape(columns, rows).T.astype(int) - middle
    assert np.mean(codes != theirs) < 1e-3  # where rounding is a tie to float32
    assert np.abs(codes - theirs).max() <= 1


def test_blocks_that_are_not_full_and_zeros() -> None:
    weight = np.zeros((5, 2), np.float32)
    weight[:, 1] = [1, -2, 0.5, 0, -8]
    codes, scales = quantize_integers(weight, 0, 3, 8)
    assert (codes.shape, scales.shape) == ((5, 2), (2, 2))
    np.testing.assert_allclose(codes * np.repeat(scales, 3, 0)[:5], weight, atol=0.02)
    assert not codes[:, 0].any()
    packed, largest = quantize_nf4(weight[:, 0], 3)
    assert packed.tolist() == [0x77, 0x77, 0x77]
    assert not largest.any()


def test_nibbles_are_packed_as_onnx_packs_them() -> None:
    codes = RANDOM.integers(-8, 8, (3, 5)).astype(np.int8)
    stored = ir.Tensor(codes.astype(ml_dtypes.int4), dtype=ir.DataType.INT4)
    assert pack_nibbles(codes).tobytes() == stored.tobytes()
