"""Integers as rows of bits: shifts and bitwise logic."""

from __future__ import annotations

import torch
from torch import Tensor

from onward.lowering.kernels.unsigned import unsigned, widen
from onward.lowering.registry import lowers

_LARGEST_SIGNED = 2**63 - 1


@lowers("BitShift", since=11)
def bit_shift(X: Tensor, Y: Tensor, *, direction: str) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__BitShift.html

    Shifts by a negative amount or by the width and more leave only what the sign bit fills in: torch's rule too.
    """
    if direction not in ("LEFT", "RIGHT"):
        raise ValueError(f"direction is {direction!r}; it must be LEFT or RIGHT.")
    bits, amount = widen(X), widen(Y)
    if direction == "LEFT":
        return (bits << amount).to(X.dtype)
    if X.dtype is torch.uint64:
        # int64 would copy the sign bit: the first place is shifted by hand, the others are positive from there on.
        return torch.where(amount == 0, bits, ((bits >> 1) & _LARGEST_SIGNED) >> (amount - 1)).to(X.dtype)
    return (bits >> amount).to(X.dtype)


for _op_type, _function in (("And", torch.bitwise_and), ("Or", torch.bitwise_or), ("Xor", torch.bitwise_xor)):
    lowers(f"Bitwise{_op_type}", since=18, inputs=("A", "B"))(unsigned("wraps")(_function))


@lowers("BitwiseNot", since=18)
@unsigned("wraps")
def bitwise_not(X: Tensor) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__BitwiseNot.html"""
    return ~X
