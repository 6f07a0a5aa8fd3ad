"""Weights in fewer bits that a run stores itself, or packs as a file does: nodes of the domain `onward.fused`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onward.graph.fusion.rewriting import DOMAIN
from onward.graph.packed_weights.blocks import BNB4_TABLES
from onward.lowering.ops.quantization import dequantize_linear
from onward.lowering.registry import lowers

lowers("DequantizeLinear", domain=DOMAIN)(dequantize_linear)


@lowers("Unpack", domain=DOMAIN)
def unpack(packed: Tensor, *, bits: int, signed: int, shape: tuple[int, ...]) -> Tensor:
    """Integers of `bits` bits, packed from the low bits of each byte on, one a byte in a shape."""
    numbers = unpack_integers(packed, bits)[: math.prod(shape)].reshape(shape)
    if not signed:
        return numbers
    # The sign bit moves to the top of the byte, and the arithmetic shift back repeats it.
    return (numbers << (8 - bits)).view(torch.int8) >> (8 - bits)


def unpack_integers(rows: Tensor, bits: int) -> Tensor:
    """(..., bytes) of uint8 -> (..., numbers), the low bits of a byte first."""
    if bits not in (2, 4, 8):
        raise ValueError(f"bits is {bits}; 2, 4 and 8 are known.")
    if bits == 8:
        return rows
    shifts = torch.arange(0, 8, bits, device=rows.device, dtype=torch.uint8)
    numbers: Tensor = (rows[..., None] >> shifts) & (2**bits - 1)
    return numbers.flatten(-2)


@lowers("DequantizeBnb4", domain=DOMAIN)
def dequantize_bnb4(
    codes: Tensor, absmax: Tensor, *, quant_type: int, block_size: int, shape: tuple[int, ...]
) -> Tensor:
    """4-bit floats of bitsandbytes in a shape: two codes a byte, the first in the high bits, a magnitude a block."""
    codes, elements = codes.reshape(-1), math.prod(shape)
    table = torch.tensor(BNB4_TABLES[quant_type], dtype=torch.float32, device=codes.device)
    pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], 1)  # what the two codes of each byte are
    numbers = pairs.view(torch.int64).flatten().index_select(0, codes.int()).view(torch.float32)  # two in one move
    wide = torch.promote_types(absmax.dtype, torch.float32)
    numbers, scales = numbers.to(wide), absmax.to(wide)
    if elements % block_size:
        return (numbers[:elements] * scales.repeat_interleave(block_size)[:elements]).reshape(shape)
    return numbers[:elements].view(-1, block_size).mul_(scales[:, None]).view(shape)
