"""Connectionist temporal classification (Graves et al., 2006), of the domain `onward.fused`: the loss, and decoding.

Lengths and labels are read on the host, where every sample is checked; torch's own kernel computes the loss.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from onward.errors import NoteWarning
from onward.graph.fusion.rewriting import DOMAIN
from onward.lowering.registry import lowers


@lowers("CTCLoss", domain=DOMAIN)
def ctc_loss(
    logits: Tensor,
    labels: Tensor,
    lengths: Tensor | None = None,
    *,
    blank: int = 0,
    ignore_index: int = -1,
    class_axis: int = 2,
    time_axis: int = 1,
    reduction: str = "mean",
    zero_infinity: int = 1,
) -> Tensor:
    """`torch.nn.functional.ctc_loss` of the softmax of logits; float32 of rank 0, float64 where the logits are.

    Args:
        logits: three axes: batch, time steps and C classes; logarithms of probabilities serve as well.
        labels: [batch, length], padded at the end with `ignore_index` or `blank`.
        lengths: [batch], the time steps of each sample that count; None: all.
        blank: the class that stands for no label.
        ignore_index: pads labels.
        class_axis, time_axis: of the logits.
        reduction: `mean`: each loss divided by the number of its labels, then the mean over the batch; or `sum`.
        zero_infinity: a sample with more labels than its time steps can hold counts as 0, and a warning says so.

    Raises:
        ValueError: shapes do not fit, a label is no class, or comes after padding; or, without `zero_infinity`, a
            sample has too few time steps for its labels.
    """
    scores = logits.permute(time_axis, 3 - class_axis - time_axis, class_axis)
    with torch.autocast(scores.device.type, enabled=False):
        log_probs = (scores if scores.dtype == torch.float64 else scores.float()).log_softmax(-1)
        if isinstance(log_probs, FakeTensor) and not torch.compiler.is_compiling():
            return _of_same_memory(log_probs, labels)
        options = (blank, ignore_index, reduction, bool(zero_infinity))
        loss: Tensor = _loss(log_probs, labels, lengths, *options)
    return loss


def _of_same_memory(log_probs: Tensor, labels: Tensor) -> Tensor:
    """For forecasts, whose labels have no values: keeps as much for the backward pass as the loss does."""
    lattice = log_probs.amax(-1).T.unsqueeze(-1).expand(-1, -1, 2 * labels.shape[1] + 1)
    return lattice.exp().sum()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _loss(
    log_probs: Tensor,
    labels: Tensor,
    lengths: Tensor | None,
    blank: int,
    ignore_index: int,
    reduction: str,
    zero_infinity: bool,
) -> Tensor:
    """The loss of log-probabilities [time, batch, classes]."""
    _check_shapes(log_probs, labels, lengths)
    sequences = _sequences(labels, log_probs.shape[2], blank, ignore_index)
    steps = _steps(lengths, *log_probs.shape[:2])
    _check_steps(sequences, steps, zero_infinity)
    targets = torch.zeros(labels.shape, dtype=torch.int64)
    for row, sequence in zip(targets, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
    device = log_probs.device
    if log_probs.is_cuda and torch.are_deterministic_algorithms_enabled():
        log_probs = log_probs.cpu()  # torch's backward kernel for GPUs adds in any order
    counts = torch.tensor([len(sequence) for sequence in sequences])
    loss = F.ctc_loss(
        log_probs,
        targets.to(log_probs.device),
        torch.tensor(steps),
        counts,
        blank=blank,
        reduction=reduction,
        zero_infinity=zero_infinity,
    )
    return loss.to(device)


@lowers("CTCGreedyMatches", domain=DOMAIN)
def ctc_greedy_matches(
    logits: Tensor,
    labels: Tensor,
    lengths: Tensor | None = None,
    *,
    blank: int = 0,
    ignore_index: int = -1,
    class_axis: int = 2,
    time_axis: int = 1,
) -> Tensor:
    """How many samples are right in every label, decoded greedily: the best class of every step, repeats merged.

    Inputs and attributes are those of `CTCLoss`; the result is int64 of rank 0.
    """
    scores = logits.permute(3 - class_axis - time_axis, time_axis, class_axis)
    best = scores.argmax(-1)
    if isinstance(best, FakeTensor) and not torch.compiler.is_compiling():
        return best.sum()
    matches: Tensor = _matches(best, labels, lengths, scores.shape[2], blank, ignore_index)
    return matches


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _matches(
    best: Tensor, labels: Tensor, lengths: Tensor | None, classes: int, blank: int, ignore_index: int
) -> Tensor:
    sequences = _sequences(labels, classes, blank, ignore_index)
    steps = _steps(lengths, best.shape[1], best.shape[0])
    hits = 0
    for row, sequence, length in zip(best.tolist(), sequences, steps, strict=True):
        hits += [number for number, _ in itertools.groupby(row[:length]) if number != blank] == sequence
    return torch.tensor(hits, device=best.device)


def _check_shapes(log_probs: Tensor, labels: Tensor, lengths: Tensor | None) -> None:
    time, batch, _ = log_probs.shape
    if labels.dim() != 2 or labels.shape[0] != batch:
        raise ValueError(
            f"the labels have shape {list(labels.shape)}, but the prediction has {batch} samples of {time} time "
            f"steps; expected labels [{batch}, length]. If {batch} is the number of time steps, set loss.time_axis."
        )
    if lengths is not None and lengths.numel() != batch:
        raise ValueError(
            f"loss.prediction_lengths has shape {list(lengths.shape)}; expected one number for each of {batch} samples."
        )


def _sequences(labels: Tensor, classes: int, blank: int, ignore_index: int) -> list[list[int]]:
    """The labels of every sample, without padding."""
    found = []
    for sample, row in enumerate(labels.tolist()):
        padding = [number in (blank, ignore_index) for number in row]
        count = padding.index(True) if True in padding else len(row)
        if not all(padding[count:]):
            raise ValueError(
                f"sample {sample} of the batch has label {row[count]} at position {count}, which is padding (the blank "
                f"is {blank}, ignore_index is {ignore_index}), and labels after it. Set loss.blank to the class that "
                "is never a label, and pad at the end only."
            )
        wrong = [number for number in row[:count] if not 0 <= number < classes]
        if wrong:
            raise ValueError(
                f"sample {sample} of the batch has the label {wrong[0]}; expected 0 to {classes - 1}, or padding: the "
                f"blank, {blank}, or ignore_index, {ignore_index}. Fix the data, or set loss.ignore_index."
            )
        found.append(row[:count])
    return found


def _steps(lengths: Tensor | None, time: int, batch: int) -> list[int]:
    """The time steps of every sample that count."""
    if lengths is None:
        return [time] * batch
    steps: list[int] = lengths.reshape(-1).tolist()
    for sample, length in enumerate(steps):
        if not 0 < length <= time:
            raise ValueError(
                f"loss.prediction_lengths of sample {sample} of the batch is {length}; expected 1 to {time}, the time "
                "steps of the prediction. Give lengths after the model's own downsampling."
            )
    return steps


def _check_steps(sequences: Sequence[Sequence[int]], steps: Sequence[int], is_allowed: bool) -> None:
    """Samples without any alignment: fewer time steps than labels, with a blank between equal neighbors."""
    for sample, (sequence, length) in enumerate(zip(sequences, steps, strict=True)):
        repeats = sum(one == other for one, other in itertools.pairwise(sequence))
        if len(sequence) + repeats <= length:
            continue
        between = f" and {repeats} repeated in a row, which need a blank between them" if repeats else ""
        what = (
            f"CTC: a sample has {len(sequence)} labels{between}, but the prediction has only {length} time steps for it"
        )
        advice = "Leave such samples out, shorten their labels, or give the model longer inputs."
        if is_allowed:
            warnings.warn(f"{what}; it counts as a loss of 0 (loss.zero_infinity). {advice}", NoteWarning, stacklevel=2)
        else:
            raise ValueError(f"sample {sample} of the batch: {what}; its loss is infinite. {advice}")
