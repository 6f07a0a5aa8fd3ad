"""Numbers of 4 and 8 bits in blocks that share a scale: quantizing, dequantizing and packing them, in numpy.

Integers are those of onnxruntime's `MatMulNBits` without zero points; 4-bit floats those of bitsandbytes, whose NF4 is
defined in QLoRA (Dettmers et al., arXiv:2305.14314, appendix E).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Bytes = NDArray[np.uint8]

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of the normal distribution, with an exact zero, for weights between -1 and 1."""

FP4 = (
    0.0, 0.005208333333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25,
    -0.0, -0.005208333333, -0.66666667, -1.0, -0.33333333, -0.5, -0.16666667, -0.25,
)  # fmt: skip
"""4-bit floats of a sign, two bits of exponent and one of mantissa, in bitsandbytes' order."""

BNB4_TABLES = (FP4, NF4)
"""`quant_type` of `MatMulBnb4` -> the number of each code."""

_CHUNK_ELEMENTS = 2**20


def quantize_integers(weight: Floats, axis: int, block_size: int, bits: int) -> tuple[NDArray[np.int8], Floats]:
    """Codes of a weight's shape, and the scales of its blocks along an axis: `weight ~ code * scale`.

    The element of largest magnitude in a block becomes the least code, -2^(bits-1), whatever its sign.
    """
    least = -(2 ** (bits - 1))
    blocks = in_blocks(weight, axis, block_size)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=axis + 1, keepdims=True), axis + 1)
    scales = (largest / np.float32(least)).astype(np.float32)
    with np.errstate(divide="ignore"):
        inverse = np.where(scales == 0, np.float32(0), np.float32(1) / scales)
    codes = np.clip(np.rint(blocks * inverse), least, -least - 1).astype(np.int8)
    return _flat(codes, weight.shape, axis), scales.squeeze(axis + 1)


def in_blocks(weight: NDArray[Any], axis: int, block_size: int) -> NDArray[Any]:
    """[..., K, ...] -> [..., blocks, block_size, ...], the last block filled up with zeros."""
    size = weight.shape[axis]
    count = -(-size // block_size)
    if count * block_size != size:
        widths = [(0, count * block_size - size if one == axis else 0) for one in range(weight.ndim)]
        weight = np.pad(weight, widths)
    return weight.reshape(*weight.shape[:axis], count, block_size, *weight.shape[axis + 1 :])


def _flat(codes: NDArray[np.int8], shape: tuple[int, ...], axis: int) -> NDArray[np.int8]:
    joined = codes.reshape(*shape[:axis], -1, *shape[axis + 1 :])
    return np.ascontiguousarray(np.take(joined, range(shape[axis]), axis) if joined.shape != shape else joined)


def pack_nibbles(codes: NDArray[np.int8]) -> Bytes:
    """Two codes a byte in the order of memory, the first in the low bits, as ONNX stores INT4."""
    return _pairs(codes.reshape(-1).view(np.uint8) & 15, 0)


def quantize_nf4(weight: Floats, block_size: int) -> tuple[Bytes, Floats]:
    """Packed codes and the largest magnitude of each block of a weight's elements, in the order of memory.

    The first code of a byte is in the high bits, as bitsandbytes has it.
    """
    flat = np.ascontiguousarray(weight, np.float32).reshape(-1)
    blocks = in_blocks(flat, 0, block_size)
    largest = np.abs(blocks).max(axis=1)
    table = np.asarray(NF4, np.float32)
    borders = (table[1:] + table[:-1]) / 2
    codes = np.full(flat.size + flat.size % 2, NF4.index(0.0), np.uint8)
    step = max(_CHUNK_ELEMENTS // block_size, 1)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest == 0, np.float32(0), np.float32(1) / largest)
    for start in range(0, len(blocks), step):
        scaled = blocks[start : start + step] * inverse[start : start + step, None]
        found = np.searchsorted(borders, scaled.reshape(-1))
        place = start * block_size
        codes[place : min(place + found.size, flat.size)] = found[: flat.size - place]
    return _pairs(codes, 4), largest


def _pairs(codes: NDArray[Any], shift_of_first: int) -> Bytes:
    if codes.size % 2:
        codes = np.pad(codes, (0, 1))
    packed: Bytes = (codes[0::2] << np.uint8(shift_of_first)) | (codes[1::2] << np.uint8(4 - shift_of_first))
    return packed
