"""The operators that context parallelism adds to a graph: parts of sequences, sums over them, and sizes of both.

`blocks`, `rows` and `samples` make up the cut axis of the full value (`onward.plan.context.ranges.TokenAxis`), which
`ranks` ranks share.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onward.lowering.registry import lowers
from onward.parallel.context.collectives import add_up, gather, own_part
from onward.parallel.horizontal.random import dropout as dropout_of_shard
from onward.plan.context.ranges import TokenAxis, local_size
from onward.plan.horizontal.cuts import DOMAIN


@lowers("ContextPart", domain=DOMAIN)
def take_part(
    X: Tensor,
    *,
    cut_axis: int,
    blocks: tuple[int, ...],
    rows: int = 1,
    samples: str = "none",
    ranks: int,
    context_rank: int,
) -> Tensor:
    """A rank's part of a full value."""
    tokens = TokenAxis(blocks, rows, samples).of_length(X.shape[cut_axis])
    return own_part(X, cut_axis, tokens, context_rank, ranks)


@lowers("ContextGather", domain=DOMAIN)
def gather_parts(
    X: Tensor,
    *,
    cut_axis: int,
    blocks: tuple[int, ...],
    rows: int = 1,
    samples: str = "none",
    ranks: int,
    context_rank: int,
    context_group: str,
) -> Tensor:
    """The full value of which every rank has a part."""
    tokens = TokenAxis(blocks, rows, samples).of_part(X.shape[cut_axis], context_rank, ranks)
    return gather(X, cut_axis, tokens, ranks, context_group)


@lowers("ContextSum", domain=DOMAIN)
def sum_of_parts(
    X: Tensor, *, ranks: int, mean_blocks: tuple[int, ...] = (), context_rank: int, context_group: str
) -> Tensor:
    """The sum of the ranks' partial sums; with `mean_blocks`, the mean of their means over their parts of an axis."""
    if mean_blocks:
        X = X * (local_size(mean_blocks, context_rank, ranks) / sum(mean_blocks))
    return add_up(X, context_group)


@lowers("ContextMeanLoss", domain=DOMAIN)
def mean_of_losses(
    loss: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    ranks: int,
    ignore_index: int | None = None,
    context_group: str,
) -> Tensor:
    """The mean over the labels of all ranks, from each rank's mean over its own: NaN only where no label counts."""
    counted = torch.ones_like(labels, dtype=torch.bool) if ignore_index is None else labels != ignore_index
    share = counted.to(loss.dtype)
    if weights is not None:
        share = share * weights.to(loss.dtype)[torch.where(counted, labels, 0).long()]
    own = share.sum()
    total = add_up(torch.where(own > 0, loss, 0) * own, context_group)
    count = add_up(own, context_group)
    return torch.where(count == 0, torch.nan, total / torch.where(count == 0, 1, count))


@lowers("LocalSizes", domain=DOMAIN, host=("sizes",), produces="host")
def local_sizes(
    sizes: tuple[int, ...],
    *,
    ranks: int,
    position: int,
    blocks: tuple[int, ...],
    rows: int = 1,
    samples: str = "none",
    is_end: int = 0,
    context_rank: int,
) -> tuple[int, ...]:
    """Sizes of a full value as those of a rank's part, but -1, 0 and 1 stay; or the end of a slice of all `blocks`."""
    full, tokens = sizes[position], TokenAxis(blocks, rows, samples)
    if not is_end and (full in (-1, 0) or (full == 1 and tokens.length != 1)):
        return sizes
    if is_end and samples != "none":  # all samples of the batch
        return (*sizes[:position], _ALL, *sizes[position + 1 :])
    own = (tokens if is_end else tokens.of_length(full)).local_length(context_rank, ranks)
    return (*sizes[:position], own, *sizes[position + 1 :])


_ALL = 2**62
"""An end behind every end."""


@lowers("FullSizes", domain=DOMAIN, host=("sizes",), produces="host")
def full_sizes(
    sizes: tuple[int, ...],
    *,
    ranks: int,
    position: int,
    blocks: tuple[int, ...],
    rows: int = 1,
    samples: str = "none",
    context_rank: int,
) -> tuple[int, ...]:
    """The shape of the full value from that of a rank's part."""
    full = TokenAxis(blocks, rows, samples).of_part(sizes[position], context_rank, ranks).length
    return (*sizes[:position], full, *sizes[position + 1 :])


@lowers("ContextDropout", domain=DOMAIN, host=("ratio_input", "training_mode"))
def dropout(
    data: Tensor,
    ratio_input: float | None = None,
    training_mode: bool | None = None,
    *,
    seed: int | None = None,
    ratio: float = 0.5,
    ranks: int,
    rank: int = 0,
    size: int = 1,
    cut_axis: int = 0,
    blocks: tuple[int, ...] = (),
    context_rank: int,
    training: bool,
    owned: tuple[bool, ...],
    output_count: int,
) -> tuple[Tensor, ...]:
    """ONNX's `Dropout` on a rank's own tokens, and on its own features where tensor-parallel ranks share them."""
    stream = _STRIDE + rank * _STRIDE + context_rank
    return dropout_of_shard(
        data,
        ratio_input,
        training_mode,
        ratio=ratio,
        cut_axis=cut_axis,
        blocks=blocks,
        rank=stream,
        size=size,
        training=training,
        owned=owned,
        output_count=output_count,
    )


_STRIDE = 2**20
"""Between the random streams of tensor-parallel ranks: more than there are context ranks."""
