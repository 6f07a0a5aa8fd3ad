"""Elements in order: TopK with the standard's rule for ties, Unique with its four outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from onward.lowering.kernels.host import HostValue
from onward.lowering.kernels.host import flatten as numbers_of
from onward.lowering.kernels.unsigned import narrow_ordered, widen_ordered
from onward.lowering.ops.movement import normalize_axis
from onward.lowering.registry import lowers


@lowers("TopK", since=10, host=("K",))
def top_k(
    X: Tensor,
    K: HostValue,
    *,
    axis: int = -1,
    largest: int = 1,
    sorted: int = 1,
    output_count: int,
    is_read: tuple[bool, ...],
) -> tuple[Tensor, ...]:
    """https://onnx.ai/onnx/operators/onnx__TopK.html; of equal values the one that comes first wins.

    Where all values are taken and nobody asks for their places, as `torch.sort` is exported, they are sorted as torch
    sorts by default: equal values may get each other's gradient, in half the time.
    """
    return _first_of_sorted(X, numbers_of(K)[0], axis, bool(largest), any(is_read[1:]))


@lowers("TopK", since=1)
def top_k_1(X: Tensor, *, k: int, axis: int = -1, output_count: int) -> tuple[Tensor, ...]:
    """https://onnx.ai/onnx/operators/onnx__TopK.html; up to version 9 k is an attribute."""
    return _first_of_sorted(X, k, axis, True, True)


def _first_of_sorted(X: Tensor, k: int, axis: int, largest: bool, has_places: bool) -> tuple[Tensor, ...]:
    axis = normalize_axis(axis, X.dim())
    if not 0 <= k <= X.shape[axis]:
        raise ValueError(f"k = {k} is out of range for axis {axis} of size {X.shape[axis]}.")
    # torch.topk breaks ties as it likes; a stable sort keeps the order of equal values.
    is_stable = has_places or k < X.shape[axis]
    values, indices = torch.sort(widen_ordered(X), dim=axis, descending=largest, stable=is_stable)
    return narrow_ordered(values.narrow(axis, 0, k), X.dtype), indices.narrow(axis, 0, k)


@lowers("Unique", since=11)
def unique(X: Tensor, *, axis: int | None = None, sorted: int = 1, output_count: int) -> tuple[Tensor, ...]:
    """https://onnx.ai/onnx/operators/onnx__Unique.html; values, first occurrences, inverse, counts."""
    along = 0 if axis is None else normalize_axis(axis, X.dim())
    data = X.reshape(-1) if axis is None else X
    _, inverse, counts = torch.unique(
        widen_ordered(data.detach()), sorted=True, return_inverse=True, return_counts=True, dim=along
    )
    places = torch.arange(inverse.numel(), device=X.device)
    first = torch.full_like(counts, inverse.numel()).scatter_reduce(0, inverse, places, "amin")
    if not sorted:
        order = torch.argsort(first)
        first, counts = first[order], counts[order]
        inverse = torch.argsort(order)[inverse]
    # Picked from the input, not from torch.unique, so that a gradient flows.
    return data.index_select(along, first), first, inverse, counts
