"""Rows of a table that are looked up, one by one or in bags, whose gradients a CPU adds in the order of the positions.

torch looks through all positions for every row, and sorts those of bags; in 16 bits it rounds after every addition.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.lowering.kernels.dtypes import LOW_PRECISION, wide_type
from onward.lowering.kernels.wide_gradients import with_wide_gradient
from onward.lowering.passes import is_plain

MOST_WIDTH = 32
"""Of rows that are added faster in order. Lookups take torch 1.4 to 6 times as long on one thread, 1 to 10 on two.
Bags of 8 numbers take 0.3 of torch's time on one thread, of 16 0.55 to 0.7, of 32 0.75 to 0.95, of 64 1.0 to 1.35; of
wider ones torch adds to several at once where there are several threads."""
BLOCK_BYTES = 4 * 2**20
"""Gradients of looked-up rows that are there at once."""


def look_up(table: Tensor, positions: Tensor) -> Tensor:
    """The rows of a table [N, E] at positions from 0 to N - 1 of any shape [...]: [..., E]."""
    # Compiled code adds in order and in float32 by itself.
    if table.is_cpu and not torch.compiler.is_compiling() and _is_added_in_order(table):
        flat = _counted_in_64_bits(table, positions.reshape(-1))
        return table.index_select(0, flat).reshape(*positions.shape, table.shape[1])
    return F.embedding(positions, table)


def select(data: Tensor, axis: int, positions: Tensor) -> Tensor:
    """`index_select` at positions [K] from 0 on."""
    positions = _counted_in_64_bits(data, positions)
    if data.dim() > 1 and axis in (0, data.dim() - 1):  # those that `index_add` adds in float32
        return data.index_select(axis, positions)
    return with_wide_gradient(lambda tensor: tensor.index_select(axis, positions), data)


def _counted_in_64_bits(table: Tensor, positions: Tensor) -> Tensor:
    """Positions of 32 bits have `index_add` round 16 bits at every addition."""
    return positions.to(torch.int64) if table.is_cpu and table.dtype in LOW_PRECISION else positions


def _is_added_in_order(table: Tensor) -> bool:
    """Whether that is faster, or more precise: `index_add` adds 16 bits in float32 and rounds once.

    Of the gradients of 80 lookups of a row, added in bfloat16 one after the other, 2 % were lost. `index_add` takes as
    long for lookups, and at most half as long again for bags.
    """
    return table.shape[1] <= MOST_WIDTH or table.dtype in LOW_PRECISION


def adds_in_order(weight: Tensor, bounds: Tensor | None, mode: str) -> bool:
    """Whether `sum_bags` takes them, and is the faster or the more precise one."""
    if mode == "max" or not weight.is_cpu or not _is_added_in_order(weight):
        return False
    # How many rows bags of different sizes have is known by their numbers alone, for which compiled code would be cut.
    is_known = bounds is None or not torch.compiler.is_compiling()
    return is_known and is_plain(weight.detach())


def sum_bags(weight: Tensor, positions: Tensor, bounds: Tensor | None, mode: str) -> Tensor:
    """`embedding_bag` of a table [N, E] and positions from 0 to N - 1: the sum or the mean of each bag [B, E]."""
    result: Tensor = _Bags.apply(weight, positions, bounds, mode)  # type: ignore[no-untyped-call]
    return result


class _Bags(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, positions: Tensor, bounds: Tensor | None, mode: str) -> Tensor:
        """Keeps the positions, and the bags' bounds."""
        ctx.save_for_backward(positions, bounds)
        ctx.shape, ctx.mode = weight.shape, mode
        return F.embedding_bag(positions, weight, bounds, mode=mode, include_last_offset=bounds is not None)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Of steps that can be differentiated again."""
        (gradient,), (positions, bounds) = gradients, ctx.saved_tensors
        dtype = gradient.dtype
        gradient = gradient.to(wide_type(dtype))
        if bounds is None:
            sizes, bag = positions.shape[1], None
        else:
            sizes = (bounds[1:] - bounds[:-1]).unsqueeze(-1)
            bag = torch.repeat_interleave(sizes.squeeze(-1))
            positions = positions[: len(bag)]
            sizes = sizes.clamp(min=1).to(gradient.dtype)
        if ctx.mode == "mean":
            gradient = gradient / sizes
        return _add_rows(ctx.shape, positions, gradient, bag).to(dtype), None, None, None


def _add_rows(shape: torch.Size, positions: Tensor, gradient: Tensor, bag: Tensor | None) -> Tensor:
    """The gradient of a table: to the row at each position, [K] or [B, L], its bag's gradient is added."""
    table = gradient.new_zeros(shape)
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return table.index_add(0, positions.reshape(-1), _rows(positions, gradient, bag))
    each = max(1, positions[:1].numel() * shape[1] * gradient.element_size())
    count = max(1, BLOCK_BYTES // each)
    for start in range(0, len(positions), count):
        part = slice(start, start + count)
        rows = _rows(positions[part], gradient[part], None) if bag is None else _rows(positions, gradient, bag[part])
        table.index_add_(0, positions[part].reshape(-1), rows)
    return table


def _rows(positions: Tensor, gradient: Tensor, bag: Tensor | None) -> Tensor:
    """The gradient of every row that was looked up [K, E]."""
    if bag is not None:
        return gradient.index_select(0, bag)
    return gradient.unsqueeze(1).expand(-1, positions.shape[1], -1).reshape(-1, gradient.shape[1])
