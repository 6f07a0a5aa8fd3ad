"""Softmax cross entropy of logits of which every rank has some classes: the logits are never gathered.

Two collectives forward, of two numbers a row at most; none backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onward.lowering.passes import only_first_derivative
from onward.lowering.registry import lowers
from onward.parallel.horizontal.collectives import all_reduce
from onward.plan.horizontal.cuts import DOMAIN
from onward.plan.shards import range_of_rank


class _RowLosses(torch.autograd.Function):
    """`log(sum(exp(x))) - x[label]` of every row, for scores [N, c, ...] of the classes from `start` on."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, labels: Tensor, start: int, group: str) -> Tensor:
        """Labels [N, ...] are classes of the unsharded axis; every one is in range."""
        largest = all_reduce(scores.amax(1, keepdim=True), "max", group)
        shifted = scores.float().sub_(largest) if scores.dtype in (torch.float16, torch.bfloat16) else scores - largest
        local = labels - start
        own = (local >= 0) & (local < scores.shape[1])
        local = torch.where(own, local, 0).unsqueeze(1)
        picked = torch.where(own.unsqueeze(1), shifted.gather(1, local), 0)
        probabilities = shifted.exp_()
        total, at_label = all_reduce(torch.stack([probabilities.sum(1, keepdim=True), picked]), "sum", group).unbind(0)
        probabilities /= total
        ctx.save_for_backward(probabilities, local, own)
        ctx.dtype = scores.dtype
        losses: Tensor = (total.log() - at_label).squeeze(1)
        return losses

    @staticmethod
    @only_first_derivative
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Probabilities, less 1 at the label."""
        probabilities, local, own = ctx.saved_tensors
        gradient = gradients[0].unsqueeze(1)
        result = probabilities * gradient
        result.scatter_add_(1, local, torch.where(own.unsqueeze(1), -gradient, 0))
        return result.to(ctx.dtype), None, None, None


@lowers("ShardedCrossEntropy", domain=DOMAIN)
def sharded_cross_entropy(
    scores: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
    cut_axis: int,
    blocks: tuple[int, ...],
    rank: int,
    size: int,
    output_count: int,
    horizontal_group: str,
) -> tuple[Tensor, ...]:
    """ONNX's `SoftmaxCrossEntropyLoss` of cut classes.

    Args:
        scores: [N, c] or [N, c, d1, ...], the rank's c of C classes.
        labels: [N] or [N, d1, ...], from 0 to C - 1 or `ignore_index`.
        weights: [C], unsharded, without a gradient.

    Raises:
        ValueError: a label is out of range (seen on the CPU only), or the weights are to be trained.
    """
    (classes,) = blocks
    labels = labels.long()
    counted = torch.ones_like(labels, dtype=torch.bool) if ignore_index is None else labels != ignore_index
    if labels.device.type == "cpu" and type(labels) is Tensor and not torch.compiler.is_compiling():
        outside = counted & ((labels < 0) | (labels >= classes))
        if bool(outside.any()):
            raise ValueError(
                f"label {int(labels[outside][0])} is out of range for {classes} classes (0 to {classes - 1}); "
                f"{int(outside.sum())} of {labels.numel()} labels are."
            )
    labels = torch.where(counted, labels, 0)
    start = range_of_rank(classes, rank, size)[0]
    losses = _RowLosses.apply(scores, labels, start, horizontal_group)  # type: ignore[no-untyped-call]
    share = counted.to(losses.dtype)
    if weights is not None:
        if weights.requires_grad:
            raise ValueError(
                "class weights cannot be trained where the classes are sharded over tensor-parallel ranks."
            )
        share = share * weights.to(losses.dtype)[labels]
    losses = torch.where(counted, losses, 0) * share
    if reduction == "none":
        return (losses.to(scores.dtype),)
    total = losses.sum()
    if reduction == "mean":
        # The mean over no label is NaN, but its gradient is zero, as torch's own.
        count = share.sum()
        total = torch.where(count == 0, torch.nan, total / torch.where(count == 0, 1, count))
    return (total.to(scores.dtype),)
