"""Weights of 2 to 8 bits in blocks of the domain com.microsoft: matrices, tables and experts, a scale for every block.

Their meaning is that of onnxruntime's documentation (docs/ContribOperators.md) and of its CPU kernels. The stored
integers have no gradient; activations, scales and biases have one.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from onward.graph.fusion.rewriting import DOMAIN
from onward.graph.nodes.structure import MICROSOFT
from onward.graph.packed_weights.blocks import BNB4_TABLES
from onward.lowering.kernels.frozen_weights import with_computed_weight
from onward.lowering.ops.contrib_experts import mixture_of_experts
from onward.lowering.ops.indexing import gather
from onward.lowering.ops.stored_weights import dequantize_bnb4, unpack_integers
from onward.lowering.registry import lowers, takes_attributes_of


@lowers("MatMulNBits", domain=MICROSOFT)
def mat_mul_n_bits(
    A: Tensor,
    B: Tensor,
    scales: Tensor,
    zero_points: Tensor | None = None,
    g_idx: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    K: int,
    N: int,
    accuracy_level: int = 0,
    bits: int = 4,
    block_size: int,
    weight_prepacked: int = 0,
) -> Tensor:
    """A (.., K) times a matrix (N, K) of 2, 4 or 8 bits in blocks along K, packed from the low bits on, plus `bias`.

    B is (N, blocks, bytes of a block); scales one per block, or with `g_idx` (K,) the one that it names for each
    element; zero points packed alike, or floats; the middle of the range without them. `accuracy_level` is a hint that
    changes nothing here.
    """
    if weight_prepacked:
        raise ValueError(
            "MatMulNBits with weight_prepacked holds its weight as one GPU's kernels read it; only weights in the "
            "standard's own order are known. Export the model again without prepacking."
        )

    def dequantize() -> Tensor:
        blocks = (B.reshape(N, -1), scales, zero_points, g_idx)
        return dequantize_n_bits(*blocks, bits=bits, block_size=block_size, columns=K).to(A.dtype)

    def multiply(weight: Tensor) -> Tensor:
        product = torch.matmul(A, weight.T)
        return product if bias is None else product + bias

    if scales.requires_grad or (zero_points is not None and zero_points.requires_grad):
        return multiply(dequantize())
    result: Tensor = with_computed_weight(dequantize, (B, scales), multiply)
    return result


def _points(zero_points: Tensor, shape: tuple[int, ...], bits: int) -> Tensor:
    """A zero point a block: packed integers, or floats."""
    if zero_points.is_floating_point():
        return zero_points.reshape(shape)
    return unpack_integers(zero_points.reshape(shape[0], -1), bits)[:, : shape[1]]


@lowers("DequantizeNBits", domain=DOMAIN)
def dequantize_n_bits(
    B: Tensor,
    scales: Tensor,
    zero_points: Tensor | None = None,
    g_idx: Tensor | None = None,
    *,
    bits: int,
    block_size: int,
    columns: int,
) -> Tensor:
    """The matrix [N, K] that the numbers of a `MatMulNBits` stand for, K being `columns`."""
    rows = B.shape[0]
    scales = scales.reshape(rows, -1)
    points = None if zero_points is None else _points(zero_points, scales.shape, bits)
    numbers = unpack_integers(B.reshape(rows, -1), bits).to(scales.dtype)
    middle: Tensor | int = 2 ** (bits - 1) if points is None else points
    if g_idx is not None:
        group = g_idx[:columns].long()
        middle = middle[:, group] if isinstance(middle, Tensor) else middle
        return (numbers[:, :columns] - middle) * scales[:, group]
    blocks = numbers[:, : scales.shape[1] * block_size].reshape(rows, -1, block_size)
    middle = middle.unsqueeze(-1) if isinstance(middle, Tensor) else middle
    return ((blocks - middle) * scales.unsqueeze(-1)).reshape(rows, -1)[:, :columns]


@lowers("MatMulBnb4", domain=MICROSOFT)
def mat_mul_bnb4(
    A: Tensor,
    B: Tensor,
    absmax: Tensor,
    *,
    K: int,
    N: int,
    block_size: int,
    quant_type: int,
    training_mode: int = 0,
    transB: int = 1,
) -> Tensor:
    """A (.., K) times a matrix of 4-bit floats as bitsandbytes stores it: FP4 (`quant_type` 0) or NF4 (1).

    The matrix is (N, K), or (K, N) without `transB`, packed without regard to its rows.
    """
    if not 0 <= quant_type < len(BNB4_TABLES):
        raise ValueError(f"quant_type is {quant_type}; 0 (FP4) and 1 (NF4) are known.")
    shape = (N, K) if transB else (K, N)

    def dequantize() -> Tensor:
        return dequantize_bnb4(B.reshape(-1), absmax, quant_type=quant_type, block_size=block_size, shape=shape).to(
            A.dtype
        )

    def multiply(weight: Tensor) -> Tensor:
        return torch.matmul(A, weight.T if transB else weight)

    if absmax.requires_grad:
        return multiply(dequantize())
    result: Tensor = with_computed_weight(dequantize, (B, absmax), multiply)
    return result


@lowers("GatherBlockQuantized", domain=MICROSOFT)
def gather_block_quantized(
    data: Tensor,
    indices: Tensor,
    scales: Tensor,
    zero_points: Tensor | None = None,
    *,
    bits: int = 4,
    block_size: int = 128,
    gather_axis: int = 0,
    quantize_axis: int = 1,
    element_types: tuple[int | None, ...],
) -> Tensor:
    """Slices of a table whose numbers share a scale in blocks along `quantize_axis`; zero points in the scales' shape.

    Tables of uint8 are packed along the last axis, low bits first, and are centred at the middle of their range where
    there are no zero points; tables of other types hold one number an element.
    """
    middle: Tensor | int = 0
    is_packed = element_types[0] == ir.DataType.UINT8
    unpacks_rows = is_packed and gather_axis % data.dim() != data.dim() - 1  # those looked up, not the entire table
    size = data.shape[quantize_axis] * (8 // bits if is_packed and quantize_axis % data.dim() == data.dim() - 1 else 1)
    if is_packed:
        middle = 2 ** (bits - 1)
        data = data if unpacks_rows else unpack_integers(data, bits)
        zero_points = None if zero_points is None else unpack_integers(zero_points, bits)[..., : scales.shape[-1]]
    along = quantize_axis % data.dim()
    if along > gather_axis % data.dim():
        along += indices.dim() - 1
    block = block_size or size
    numbers, scale = gather(data, indices, axis=gather_axis), gather(scales, indices, axis=gather_axis)
    numbers = unpack_integers(numbers, bits) if unpacks_rows else numbers
    if zero_points is not None:
        middle = _spread(gather(zero_points, indices, axis=gather_axis), block, along, numbers.shape[along])
    scale = _spread(scale, block, along, numbers.shape[along])
    return (numbers.to(scale.dtype) - middle) * scale


def _spread(blocks: Tensor, block_size: int, axis: int, size: int) -> Tensor:
    """A number for every block along an axis -> one for every element of `size`."""
    return blocks.repeat_interleave(block_size, axis).narrow(axis, 0, size)


@lowers("QMoE", domain=MICROSOFT)
@takes_attributes_of(mixture_of_experts)
def mixture_of_quantized_experts(
    input: Tensor,
    router_probs: Tensor,
    fc1_experts_weights: Tensor,
    fc1_scales: Tensor,
    fc1_experts_bias: Tensor | None,
    fc2_experts_weights: Tensor,
    fc2_scales: Tensor,
    fc2_experts_bias: Tensor | None = None,
    *more: Tensor | None,
    accuracy_level: int = 0,
    block_size: int | None = None,
    expert_weight_bits: int = 4,
    fc1_expert_weight_bits: int | None = None,
    fc2_expert_weight_bits: int | None = None,
    quant_type: str = "int",
    weights_prepacked: int = -1,
    **attributes: Any,
) -> Tensor:
    """MoE whose matrices are packed along their last axis, low bits first; scales (E, rows) or (E, rows, blocks).

    `more`: fc3's matrix, scales and bias, which are not known, then the zero points of fc1 and fc2, packed alike; the
    middle of the range without them. `accuracy_level` is a hint that changes nothing here.
    """
    points = (*more[3:5], None, None)[:2]
    if quant_type != "int" or weights_prepacked == 1 or any(extra is not None for extra in (*more[:3], *more[5:])):
        raise ValueError(
            "QMoE with an fc3, prepacked weights, weights of the router apart from its logits, scales of activations "
            f"or quant_type {quant_type!r} is not known."
        )
    bits = (fc1_expert_weight_bits or expert_weight_bits, fc2_expert_weight_bits or expert_weight_bits)
    first = _matrices(fc1_experts_weights, fc1_scales, points[0], bits[0], block_size)
    second = _matrices(fc2_experts_weights, fc2_scales, points[1], bits[1], block_size)
    return mixture_of_experts(input, router_probs, first, fc1_experts_bias, second, fc2_experts_bias, **attributes)


def _matrices(packed: Tensor, scales: Tensor, zero_points: Tensor | None, bits: int, block_size: int | None) -> Tensor:
    """(E, rows, bytes) -> (E, rows, columns) of what the numbers stand for."""
    numbers = unpack_integers(packed, bits)
    scales = scales if scales.dim() == 3 else scales.unsqueeze(-1)
    size = numbers.shape[-1]
    block = block_size or size
    middle: Tensor | int = 2 ** (bits - 1)
    if zero_points is not None:
        unpacked = unpack_integers(zero_points, bits)
        unpacked = unpacked if zero_points.dim() == 3 else unpacked.unsqueeze(-1)
        middle = _spread(unpacked[..., : scales.shape[-1]], block, -1, size)
    return (numbers.to(scales.dtype) - middle) * _spread(scales, block, -1, size)
