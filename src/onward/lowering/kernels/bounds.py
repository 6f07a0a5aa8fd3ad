"""Bounds of every element: torch's `clamp`, whose gradient on a CPU is one pass without branches.

torch's own gradient of `clamp` compares twice and chooses element by element: 4.6 ns an element where the order of the
choices cannot be predicted, on a CPU. The gradients of `hardtanh` and `threshold` take 0.2 ns; they leave out what is
equal to a bound, so that they get the next number beyond it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from onward.lowering.passes import is_plain

LEAST_ELEMENTS = 4096
"""Of fewer, torch's own gradient takes less time than a function of Python's begins in."""


def clamp(x: Tensor, low: float | None, high: float | None) -> Tensor:
    """`torch.clamp(x, low, high)`; the gradient of an element equal to a bound is 1, as there.

    Args:
        x: of any type and shape.
        low, high: numbers; None: no bound. At least one is given.
    """
    if torch.compiler.is_compiling() or not (x.is_cpu and is_plain(x)) or is_functorch_wrapped_tensor(x):
        return torch.clamp(x, low, high)  # before its size is asked for: an open one would be fixed by the answer
    is_usual = x.dtype in (torch.float32, torch.float64) and x.requires_grad and torch.is_grad_enabled()
    if not is_usual or x.numel() < LEAST_ELEMENTS:
        return torch.clamp(x, low, high)
    result: Tensor = _Clamp.apply(x, low, high)  # type: ignore[no-untyped-call]
    return result


def _beyond(bound: float, direction: float, dtype: torch.dtype) -> float:
    """The number of a type that is next to a bound, on its other side."""
    kind = np.float32 if dtype is torch.float32 else np.float64
    return float(np.nextafter(kind(bound), kind(direction)))


class _Clamp(torch.autograd.Function):
    """Keeps its input; its gradient has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float | None, high: float | None) -> Tensor:
        """torch's own."""
        ctx.save_for_backward(x)
        ctx.bounds = low, high
        return torch.clamp(x, low, high)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The gradient where x is within the bounds, else 0."""
        (x,), (low, high) = ctx.saved_tensors, ctx.bounds
        below = -math.inf if low is None else _beyond(low, -math.inf, x.dtype)
        if high is None:
            return torch.ops.aten.threshold_backward(gradients[0], x, below), None, None
        above = _beyond(high, math.inf, x.dtype)
        return torch.ops.aten.hardtanh_backward(gradients[0], x, below, above), None, None
