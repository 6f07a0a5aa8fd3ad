"""Losses of the standard: softmax cross entropy and negative log likelihood.

A language model spends its largest tensor here, so classes are brought to the last axis wherever that is a view,
and nothing is computed that no output asks for.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.lowering.kernels.dtypes import LOW_PRECISION, wide_type
from onward.lowering.kernels.short_rows import log_softmax
from onward.lowering.ops.indexing import gather
from onward.lowering.registry import lowers

NOTHING_IGNORED = -(2**40)
"""The ignore_index that torch gets where the node ignores nothing: no label is so small (torch itself ignores -100)."""

_REDUCTIONS = ("none", "sum", "mean")


@lowers("SoftmaxCrossEntropyLoss", since=12)
def softmax_cross_entropy_loss(
    scores: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
    output_count: int,
) -> tuple[Tensor, ...]:
    """https://onnx.ai/onnx/operators/onnx__SoftmaxCrossEntropyLoss.html

    Scores of 16 bits are normalized in float32. The mean over no label at all is NaN, as in the standard's own
    definition and in onnxruntime.

    Args:
        scores: [N, C] or [N, C, d1, ...].
        labels: [N] or [N, d1, ...], from 0 to C - 1 or `ignore_index`.
        weights: [C].

    Raises:
        ValueError: shapes do not fit, or (on the CPU; a GPU asserts by itself) a label is out of range.
    """
    check_loss_inputs(scores, labels, weights, ignore_index, reduction)
    if output_count == 1:
        return (loss_of_scores(scores, labels, weights, ignore_index, reduction),)
    log_prob = _log_softmax(scores)
    loss = _likelihood_loss(log_prob, labels, weights, ignore_index, reduction)
    return loss.to(scores.dtype), log_prob.to(scores.dtype)


def loss_of_scores(
    scores: Tensor, labels: Tensor, weights: Tensor | None, ignore_index: int | None, reduction: str
) -> Tensor:
    """The loss alone, of inputs that are checked."""
    rows, row_labels, shape = _as_rows(scores, labels)
    loss = _likelihood_loss(_log_softmax(rows), row_labels, weights, ignore_index, reduction).to(scores.dtype)
    return loss.reshape(shape) if reduction == "none" else loss


@lowers("NegativeLogLikelihoodLoss", since=12)
def negative_log_likelihood_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__NegativeLogLikelihoodLoss.html

    Args:
        input: log probabilities, [N, C] or [N, C, d1, ...].
        target: [N] or [N, d1, ...], from 0 to C - 1 or `ignore_index`.
        weight: [C].

    Raises:
        ValueError: shapes do not fit, or (on the CPU; a GPU asserts by itself) a label is out of range.
    """
    check_loss_inputs(input, target, weight, ignore_index, reduction)
    return _likelihood_loss(input, target, weight, ignore_index, reduction)


def _as_rows(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, torch.Size]:
    """Scores [N, C, d1, ...] as rows [N * d1 * ..., C] if that is a view of them; with labels, and their shape."""
    if scores.ndim > 2:
        classes_last = scores.movedim(1, -1)
        if classes_last.is_contiguous():
            return classes_last.reshape(-1, scores.shape[1]), labels.reshape(-1), labels.shape
    return scores, labels, labels.shape


def _log_softmax(scores: Tensor) -> Tensor:
    if scores.dtype in LOW_PRECISION:
        return torch.log_softmax(scores, 1, dtype=torch.float32)
    return log_softmax(scores, 1)


def _likelihood_loss(
    log_prob: Tensor, labels: Tensor, weights: Tensor | None, ignore_index: int | None, reduction: str
) -> Tensor:
    ignored = NOTHING_IGNORED if ignore_index is None else ignore_index
    log_prob = log_prob.contiguous()  # of images with the channels last, torch refuses the backward pass
    if weights is not None:
        weights = weights.to(log_prob.dtype)
        if weights.requires_grad:
            return _loss_of_trained_weights(log_prob, labels.long(), weights, ignored, reduction)
    return F.nll_loss(log_prob, labels.long(), weights, ignore_index=ignored, reduction=reduction)


def _loss_of_trained_weights(log_prob: Tensor, labels: Tensor, weights: Tensor, ignored: int, reduction: str) -> Tensor:
    """The same in steps that are differentiable in the class weights, which torch's own loss is not."""
    counted, wide = labels != ignored, wide_type(log_prob.dtype)
    share = torch.where(counted, gather(weights.to(wide), torch.where(counted, labels, 0)), 0.0)
    losses = share * F.nll_loss(log_prob.to(wide), labels, ignore_index=ignored, reduction="none")
    if reduction == "mean":
        losses = losses.sum() / share.sum()
    elif reduction == "sum":
        losses = losses.sum()
    return losses.to(log_prob.dtype)


def check_loss_inputs(
    scores: Tensor, labels: Tensor, weights: Tensor | None, ignore_index: int | None, reduction: str
) -> None:
    """Checks shapes and labels of a loss, of scores [N, C, ...] with labels [N, ...].

    Raises:
        ValueError: they do not fit, or (on the CPU) a label is out of range.
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}; it must be one of {', '.join(_REDUCTIONS)}.")
    if scores.ndim < 2:
        raise ValueError(f"scores are {list(scores.shape)}; expected [N, C] or [N, C, d1, ...].")
    expected = (scores.shape[0], *scores.shape[2:])
    if tuple(labels.shape) != expected:
        raise ValueError(
            f"labels are {list(labels.shape)}; with scores {list(scores.shape)}, classes on axis 1, they must be "
            f"{list(expected)}."
        )
    classes = scores.shape[1]
    if weights is not None and tuple(weights.shape) != (classes,):
        raise ValueError(f"class weights are {list(weights.shape)}; {classes} classes need [{classes}].")
    if labels.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_range(labels, classes, ignore_index)


def _check_range(labels: Tensor, classes: int, ignore_index: int | None) -> None:
    if labels.is_meta or type(labels) is not Tensor or labels.numel() == 0:
        return
    lowest, highest = torch.aminmax(labels)
    if lowest.item() >= 0 and highest.item() < classes:
        return
    outside = (labels < 0) | (labels >= classes)
    if ignore_index is not None:
        outside &= labels != ignore_index
    if outside.any():
        place = tuple(outside.nonzero()[0].tolist())
        ignored = "no label is ignored" if ignore_index is None else f"only {ignore_index} is ignored"
        raise ValueError(
            f"label {labels[place].item()} is out of range for {classes} classes (0 to {classes - 1}; {ignored}); "
            f"{int(outside.sum())} of {labels.numel()} labels are, the first at {list(place)}."
        )
