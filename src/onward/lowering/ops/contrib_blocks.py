"""Weights of 2 to 8 bits in blocks of the domain com.microsoft: matrices, tables and experts, a scale for every block.

Their meaning is that of onnxruntime's documentation (docs/ContribOperators.md) and of its CPU kernels. The stored
integers have no gradient; activations, scales and biases have one.
"""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch import Tensor

from onward.lowering.ops.contrib import MICROSOFT
from onward.lowering.ops.contrib_experts import mixture_of_experts
from onward.lowering.ops.indexing import gather
from onward.lowering.registry import lowers


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

    B is (N, blocks, bytes of a block); scales one per block; zero points packed alike, or floats; the middle of the
    range without them. `accuracy_level` is a hint that changes nothing here.
    """
    if g_idx is not None or weight_prepacked:
        raise ValueError("MatMulNBits with g_idx or prepacked weights is not known.")
    blocks = -(-K // block_size)
    packed = _unpack(B.reshape(N, -1), bits)[:, : blocks * block_size].reshape(N, blocks, block_size)
    if zero_points is None:
        middle: Tensor | int = 2 ** (bits - 1)
    elif zero_points.is_floating_point():
        middle = zero_points.reshape(N, blocks, 1)
    else:
        middle = _unpack(zero_points.reshape(N, -1), bits)[:, :blocks].reshape(N, blocks, 1)
    weight = (packed.to(scales.dtype) - middle) * scales.reshape(N, blocks, 1)
    product = torch.matmul(A, weight.reshape(N, -1)[:, :K].T.to(A.dtype))
    return product if bias is None else product + bias


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
    if element_types[0] == ir.DataType.UINT8:
        data, middle = _unpack(data, bits), 2 ** (bits - 1)
        zero_points = None if zero_points is None else _unpack(zero_points, bits)[..., : scales.shape[-1]]
    along = quantize_axis % data.dim()
    if along > gather_axis % data.dim():
        along += indices.dim() - 1
    block = block_size or data.shape[quantize_axis]
    numbers, scale = gather(data, indices, axis=gather_axis), gather(scales, indices, axis=gather_axis)
    if zero_points is not None:
        middle = _spread(gather(zero_points, indices, axis=gather_axis), block, along, numbers.shape[along])
    scale = _spread(scale, block, along, numbers.shape[along])
    return (numbers.to(scale.dtype) - middle) * scale


def _spread(blocks: Tensor, block_size: int, axis: int, size: int) -> Tensor:
    """A number for every block along an axis -> one for every element of `size`."""
    return blocks.repeat_interleave(block_size, axis).narrow(axis, 0, size)


@lowers("QMoE", domain=MICROSOFT)
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
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    activation_type: str = "relu",
    block_size: int | None = None,
    expert_weight_bits: int = 4,
    fc1_expert_weight_bits: int | None = None,
    fc2_expert_weight_bits: int | None = None,
    k: int = 1,
    normalize_routing_weights: int = 0,
    quant_type: str = "int",
    swiglu_fusion: int = 0,
    swiglu_limit: float = torch.inf,
    use_sparse_mixer: int = 0,
    weights_prepacked: int = -1,
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
    return mixture_of_experts(
        input,
        router_probs,
        first,
        fc1_experts_bias,
        second,
        fc2_experts_bias,
        activation_alpha=activation_alpha,
        activation_beta=activation_beta,
        activation_type=activation_type,
        k=k,
        normalize_routing_weights=normalize_routing_weights,
        swiglu_fusion=swiglu_fusion,
        swiglu_limit=swiglu_limit,
        use_sparse_mixer=use_sparse_mixer,
    )


def _matrices(packed: Tensor, scales: Tensor, zero_points: Tensor | None, bits: int, block_size: int | None) -> Tensor:
    """(E, rows, bytes) -> (E, rows, columns) of what the numbers stand for."""
    numbers = _unpack(packed, bits)
    scales = scales if scales.dim() == 3 else scales.unsqueeze(-1)
    size = numbers.shape[-1]
    block = block_size or size
    middle: Tensor | int = 2 ** (bits - 1)
    if zero_points is not None:
        unpacked = _unpack(zero_points, bits)
        unpacked = unpacked if zero_points.dim() == 3 else unpacked.unsqueeze(-1)
        middle = _spread(unpacked[..., : scales.shape[-1]], block, -1, size)
    return (numbers.to(scales.dtype) - middle) * _spread(scales, block, -1, size)


def _unpack(rows: Tensor, bits: int) -> Tensor:
    """(..., bytes) of uint8 -> (..., numbers), the low bits of a byte first."""
    if bits not in (2, 4, 8):
        raise ValueError(f"bits is {bits}; 2, 4 and 8 are known.")
    shifts = torch.arange(0, 8, bits, device=rows.device, dtype=torch.uint8)
    numbers: Tensor = (rows[..., None] >> shifts) & (2**bits - 1)
    return numbers.flatten(-2)
