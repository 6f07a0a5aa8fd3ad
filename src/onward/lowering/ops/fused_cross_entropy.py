"""The last linear layer with the cross entropy after it, a chunk of rows at a time: logits are never all in memory.

Each chunk's logits live until their share of the gradient is computed, right in the forward pass; what is kept is the
gradient of the layer's input and of its weight (as in Hsu et al., 2024, "Liger Kernel"). On CPUs, rows whose label is
ignored are left out. N rows, W features, V classes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from onward.graph.fusion.rewriting import DOMAIN
from onward.lowering.kernels.matmuls import multiply
from onward.lowering.ops.loss import NOTHING_IGNORED, check_loss_inputs, loss_of_scores
from onward.lowering.passes import is_plain, only_first_derivative
from onward.lowering.registry import lowers

CHUNK_BYTES = {"cpu": 8 * 2**20, "cuda": 512 * 2**20}
"""Logits held at once, in float32."""
CHUNK_ROWS = {"cpu": 256}
"""Rows of a chunk at least, elsewhere W: with fewer, adding to the weight's gradient delays what is added."""
COMPILED_BYTES = {"cpu": 32 * 2**20, "cuda": 512 * 2**20}
"""Logits that torch's compiler differentiates as usual, all at once."""
SMALL_BYTES = 2**20
"""Logits up to this on a CPU are differentiated as usual, all at once: chunks take longer to begin than to compute."""
ALIGNED_BYTES = {"cpu": 1, "cuda": 16}
"""Rows of logits begin at multiples of this: without, cuBLAS multiplies at a sixth of its rate (bf16, on an H200)."""
ROWS_OF_TILE = 128
"""Rows of chunks are multiples of this, as kernels for products compute them at once."""
BLOCK_BYTES = {"cpu": 2**20}
"""Logits that become gradients at once, in place: on a CPU what its cache holds; elsewhere, and compiled, a chunk."""


@lowers("LinearCrossEntropy", domain=DOMAIN, spare=("scores", "logits"))
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    scores: Tensor | None = None,
    logits: Tensor | None = None,
    class_weights: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
    rows_are_classes: int = 1,
) -> Tensor:
    """Softmax cross entropy of `hidden weight' + bias`; float32 of rank 0, float64 where the input is.

    Args:
        hidden: [..., W], N rows in all.
        weight: [V, W] if `rows_are_classes`, else [W, V].
        labels: [N], from 0 to V - 1 or `ignore_index`.
        scores: [N, V], where the program computes them anyway; the loss is then taken of them.
        logits: what `scores` were made of; only tells whether they are computed anyway.
        class_weights: [V].
        bias: [V].
        ignore_index: label that does not count.
        reduction: `mean` over the labels that count, each with its class's weight, or `sum`.
        rows_are_classes: how the weight is laid out.

    Raises:
        ValueError: shapes do not fit, or (on the CPU) a label is out of range.
    """
    if scores is not None:
        check_loss_inputs(scores, labels, class_weights, ignore_index, reduction)
        return loss_of_scores(scores, labels, class_weights, ignore_index, reduction)
    rows = hidden.reshape(-1, hidden.shape[-1])
    matrix = weight if rows_are_classes else weight.T
    device = rows.device.type
    if torch.is_autocast_enabled(device) and rows.dtype != torch.float64:
        low = torch.get_autocast_dtype(device)
        rows, matrix, bias = rows.to(low), matrix.to(low), None if bias is None else bias.to(low)
    check_loss_inputs(_shape_of_scores(rows, matrix), labels, class_weights, ignore_index, reduction)
    if not is_plain(rows) or _is_small(rows, matrix):
        if 4 * rows.shape[0] * matrix.shape[0] >= SMALL_BYTES // 8 and is_plain(rows):
            rows, labels = _rows_that_count(rows, labels.long(), ignore_index)
        with torch.autocast(device, enabled=False):
            padded = F.linear(rows, *aligned(matrix, bias))
            computed = _widened(padded if padded.shape[1] == len(matrix) else padded[:, : len(matrix)])
            return loss_of_scores(computed, labels, class_weights, ignore_index, reduction)
    rows, labels = _rows_that_count(rows, labels.long(), ignore_index)
    loss: Tensor = _Chunked.apply(  # type: ignore[no-untyped-call]
        rows,
        matrix,
        bias,
        labels,
        class_weights,
        NOTHING_IGNORED if ignore_index is None else ignore_index,
        reduction == "mean",
    )
    return loss


def _rows_that_count(rows: Tensor, labels: Tensor, ignored: int | None) -> tuple[Tensor, Tensor]:
    """Rows [N, W] and labels [N] without those that are ignored, if they are an eighth or more, on a CPU.

    On a GPU the host would have to wait for their number. If no label counts all stay, for the NaN that is the mean.
    """
    if ignored is None or rows.device.type != "cpu" or isinstance(rows, FakeTensor) or torch.compiler.is_compiling():
        return rows, labels
    is_counted = labels != ignored
    if not 0 < int(is_counted.count_nonzero()) <= len(labels) * 7 // 8:
        return rows, labels
    counted = is_counted.nonzero().squeeze(-1)
    return rows.index_select(0, counted), labels[counted]


def _is_small(rows: Tensor, matrix: Tensor) -> bool:
    """Whether all logits may be there at once."""
    if torch.compiler.is_compiling():
        return rows.shape[0] <= rows_of_chunk(rows.device.type, matrix)
    return rows.device.type == "cpu" and 4 * rows.shape[0] * matrix.shape[0] <= SMALL_BYTES


def _shape_of_scores(rows: Tensor, matrix: Tensor) -> Tensor:
    """A tensor of the scores' shape that takes no memory."""
    return rows.new_empty(()).expand(rows.shape[0], matrix.shape[0])


def rows_of_chunk(device: str, matrix: Tensor) -> int:
    """How many rows of logits with a matrix [V, W] are held at once."""
    classes, width = matrix.shape
    limits = COMPILED_BYTES if torch.compiler.is_compiling() else CHUNK_BYTES
    rows = max(CHUNK_ROWS.get(device, width), limits.get(device, limits["cuda"]) // (4 * classes))
    return rows // ROWS_OF_TILE * ROWS_OF_TILE or rows


def aligned(matrix: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A matrix [V, W] and a bias [V] with as many rows of zeros after them as rows of logits need to be aligned."""
    multiple = max(1, ALIGNED_BYTES.get(matrix.device.type, 1) // matrix.element_size())
    missing = -matrix.shape[0] % multiple
    if not missing:
        return matrix, bias
    return F.pad(matrix, (0, 0, 0, missing)), None if bias is None else F.pad(bias, (0, missing))


def rows_of_block(logits: Tensor) -> int:
    """How many rows of logits [N, V] become gradients at once; all that has no numbers does."""
    device, (count, classes) = logits.device.type, logits.shape
    if device not in BLOCK_BYTES or torch.compiler.is_compiling() or isinstance(logits, FakeTensor):
        return count
    return max(1, min(count, BLOCK_BYTES[device] // (4 * classes)))


def _widened(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


class _Chunked(torch.autograd.Function):
    """Loss and gradients, chunk by chunk, in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        matrix: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        class_weights: Tensor | None,
        ignored: int,
        mean: bool,
    ) -> Tensor:
        """The loss of rows [N, W] with matrix [V, W]."""
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        classes, (padded, padded_bias) = matrix.shape[0], aligned(matrix, bias)
        counted = labels != ignored
        labels = torch.where(counted, labels, 0).unsqueeze(-1)
        shares = torch.ones_like(labels, dtype=wide) if class_weights is None else class_weights.to(wide)[labels]
        shares = torch.where(counted.unsqueeze(-1), shares, 0.0)
        total = torch.zeros((), dtype=wide, device=rows.device)
        wanted = ctx.needs_input_grad
        of_rows = torch.empty_like(rows) if wanted[0] else None
        # Gradients of the weight add up in float32 over the chunks, whatever the type of the products.
        make = torch.empty if rows.shape[0] else torch.zeros
        of_matrix = make(padded.shape, dtype=wide, device=rows.device) if wanted[1] else None
        of_bias = (
            torch.zeros(matrix.shape[0], dtype=wide, device=rows.device) if bias is not None and wanted[2] else None
        )
        size = rows_of_chunk(rows.device.type, matrix)
        differentiate = _differentiated_at_once if torch.compiler.is_compiling() else _differentiated_in_place
        with torch.autocast(rows.device.type, enabled=False):
            starts = range(0, rows.shape[0], size)
            # Of tensors without memory two chunks take and leave what all do.
            for start in starts[:2] if isinstance(rows, FakeTensor) else starts:
                chunk = slice(start, start + size)
                part = rows[chunk]
                # The scores of classes that only align rows are zero, as are their gradients.
                scores = multiply(part, padded.T, padded_bias)
                loss, scores = differentiate(scores, of_bias, classes, labels[chunk], shares[chunk])
                total += loss
                if not any(wanted[:3]):
                    continue
                if of_rows is not None:
                    of_rows[chunk] = multiply(scores, padded)
                if of_matrix is not None:
                    _add_product(of_matrix, scores.T, part, is_first=not start)
                del scores  # or they would live alongside the next chunk
        scale = torch.ones((), dtype=wide, device=rows.device)
        if mean:
            count = shares.sum()
            # The mean over no label is NaN, but its gradient is zero, as torch's own.
            total, scale = total / count, torch.where(counted.any(), 1.0 / count, 0.0)
        ctx.save_for_backward(of_rows, None if of_matrix is None else of_matrix[:classes], of_bias, scale)
        ctx.dtypes = rows.dtype, matrix.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    @only_first_derivative
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """What the forward pass kept, times the gradient of the loss; in place, unless the pass keeps its graph.

        Schedules that compute gradients of weights later run it once for those, and before for the rows.
        """
        *kept, scale = ctx.saved_tensors
        factor = gradients[0] * scale
        multiplied = torch.mul if _runs_again() else Tensor.mul_
        found = [
            None if tensor is None else multiplied(tensor, factor).to(dtype)
            for tensor, dtype in zip(kept, ctx.dtypes, strict=True)
        ]
        return (*found, None, None, None, None)


def _runs_again() -> bool:
    """Whether the backward pass that is under way keeps its graph for another; torch's compiler cannot ask that."""
    return torch.compiler.is_compiling() or bool(torch._C._autograd._get_current_graph_task_keep_graph())


def _differentiated_in_place(
    scores: Tensor, of_bias: Tensor | None, classes: int, labels: Tensor, shares: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss of scores [N, V'], of which the first `classes` columns are logits, and their gradient in their place.

    The loss is summed with the shares [N, 1] of the labels [N, 1]; `of_bias` [classes] is added to.
    """
    logits = _widened(scores[:, :classes])
    total = torch.zeros((), dtype=logits.dtype, device=logits.device)
    size = rows_of_block(logits)
    for start in range(0, logits.shape[0], size):
        block, label, share = (tensor[start : start + size] for tensor in (logits, labels, shares))
        score = block.gather(1, label)
        highest = block.amax(-1, keepdim=True)
        exponentials = block.sub_(highest).exp_()
        sums = exponentials.sum(-1, keepdim=True)
        total += ((sums.log() + highest - score) * share).sum()
        exponentials.mul_(share / sums).scatter_add_(1, label, -share)
    if of_bias is not None:
        of_bias += logits.sum(0)
    if logits.dtype != scores.dtype:
        scores[:, :classes] = logits
    return total, scores


def _differentiated_at_once(
    scores: Tensor, of_bias: Tensor | None, classes: int, labels: Tensor, shares: Tensor
) -> tuple[Tensor, Tensor]:
    """The same in new tensors: the compiler does not fuse what is written to places that depend on values.

    What is added to `of_bias` is rounded to the type of the scores, as its sum is in the end.
    """
    logits, places = _widened(scores), torch.arange(scores.shape[1], device=scores.device)
    if classes < scores.shape[1]:
        logits = torch.where(places < classes, logits, -torch.inf)
    score, highest = logits.gather(1, labels), logits.amax(-1, keepdim=True)
    exponentials = (logits - highest).exp()
    sums = exponentials.sum(-1, keepdim=True)
    total = ((sums.log() + highest - score) * shares).sum()
    gradient = ((exponentials / sums - (places == labels).to(logits.dtype)) * shares).to(scores.dtype)
    if of_bias is not None:
        # A matmul with ones: as sums, those of all chunks would be one kernel, for which all gradients are kept. One
        # column would be made a sum again; kernels for matmuls take eight at once.
        of_bias += (gradient.T @ gradient.new_ones(gradient.shape[0], 8))[:classes, 0]
    return total, gradient


def _add_product(total: Tensor, left: Tensor, right: Tensor, is_first: bool) -> None:
    """`total += left @ right`, the sum in the type of the total, which has no numbers yet if this is the first."""
    if total.dtype == left.dtype:
        total.addmm_(left, right, beta=0 if is_first else 1)
    elif is_first:
        total.copy_(left @ right)
    else:
        total += left @ right
