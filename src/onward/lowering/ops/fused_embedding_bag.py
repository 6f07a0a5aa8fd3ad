"""Bags of embeddings (`nn.EmbeddingBag`): sums, means or maxima of the rows that are looked up for each bag."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.graph.fusion.rewriting import DOMAIN
from onward.lowering.kernels.dtypes import wide_on_cpus
from onward.lowering.kernels.embeddings import adds_in_order, look_up, sum_bags
from onward.lowering.ops.indexing import wrap_positions
from onward.lowering.passes import is_traced
from onward.lowering.registry import lowers


@lowers("EmbeddingBag", domain=DOMAIN)
def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    bounds: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
    *,
    mode: str = "sum",
) -> Tensor:
    """One row [E] for each bag, of the rows of `weight` [N, E]; zeros for an empty bag. An equal maximum: the first.

    Args:
        weight: the table.
        indices: a bag in each row [B, L]; or all bags one after the other [K], with `bounds`.
        bounds: where each bag begins, and the last one ends [B + 1], from 0 to K.
        per_sample_weights: factors of the rows [K], for sums alone.
        mode: `sum`, `mean` or `max`.
    """
    positions = wrap_positions(indices, weight.shape[0])
    if per_sample_weights is None and adds_in_order(weight, bounds, mode):
        return sum_bags(weight, positions, bounds, mode)
    if not is_traced() and not (mode == "max" and weight.is_cuda):  # where torch adds gradients in no fixed order
        # On a CPU torch would round the table's gradient in 16 bits at every addition.
        wide = wide_on_cpus(weight)
        bags = F.embedding_bag(
            positions,
            weight.to(wide),
            bounds,
            mode=mode,
            per_sample_weights=None if per_sample_weights is None else per_sample_weights.to(wide),
            include_last_offset=bounds is not None,
        )
        return bags.to(weight.dtype)
    rows = look_up(weight, positions)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if bounds is None:
        if mode == "max":
            return rows.gather(1, rows.detach().argmax(1, keepdim=True)).squeeze(1)
        return rows.mean(1) if mode == "mean" else rows.sum(1)
    return _reduce_ragged(rows, bounds.to(torch.int64), mode)


def _reduce_ragged(rows: Tensor, bounds: Tensor, mode: str) -> Tensor:
    """Bags of different sizes, by operators that ONNX has, of which gradients are known."""
    ends, count = bounds[1:], bounds.shape[0] - 1
    changes = torch.zeros(rows.shape[0] + 1, dtype=torch.int64, device=rows.device)
    # Element j is in the bag before which j ends lie; what is after the last end is in a bag that is left out.
    bags = changes.scatter_add(0, ends, torch.ones_like(ends)).cumsum(0)[:-1]
    places = bags.unsqueeze(-1).expand_as(rows)
    sizes = (ends - bounds[:-1]).unsqueeze(-1)
    zeros = rows.new_zeros((count + 1, rows.shape[1]))
    if mode != "max":
        total = zeros.scatter_add(0, places, rows)[:-1]
        return total / sizes.clamp(min=1).to(rows.dtype) if mode == "mean" else total
    fixed = rows.detach()
    largest = zeros.scatter_reduce(0, places, fixed, "amax", include_self=False)
    order = torch.arange(rows.shape[0], device=rows.device).unsqueeze(-1).expand_as(rows)
    last = rows.shape[0] - 1
    candidates = torch.where(fixed == largest.gather(0, places), order, last)
    first = torch.full_like(zeros, last, dtype=torch.int64).scatter_reduce(0, places, candidates, "amin")
    return torch.where(sizes > 0, rows.gather(0, first[:-1]), 0.0)
