"""Reading a tensor at places between its elements, over any number of spatial axes.

Legend: N batch, C channels, D1...Dn spatial axes of X (N, C, D1..Dn); P places, each with n coordinates in elements,
in the order of the axes: (N, P, n).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

Taps = list[tuple[Tensor, Tensor]]
"""Along one axis: which elements (int64, (N, P)) count with which weights (N, P)."""


def gather(X: Tensor, indices: list[Tensor]) -> Tensor:
    """The elements of X at integer places: one index (N, P) per spatial axis, each in range -> (N, C, P)."""
    flat = indices[0]
    for size, index in zip(X.shape[3:], indices[1:], strict=True):
        flat = flat * size + index
    return X.flatten(2).gather(2, flat[:, None].expand(-1, X.shape[1], -1))


def sample(X: Tensor, taps: list[Taps], pad: Callable[[Tensor, int], tuple[Tensor, Tensor | None]]) -> Tensor:
    """The weighted sum of the elements of X that the taps of every axis name: (N, C, P).

    `pad(index, axis)` brings an index into range, and tells which were inside (None: all of them count).
    """
    padded = []
    for axis, pairs in enumerate(taps):
        along = []
        for index, weight in pairs:
            index, inside = pad(index, axis)
            along.append((index, weight if inside is None else torch.where(inside, weight, 0)))
        padded.append(along)
    total: Tensor | None = None
    for corner in itertools.product(*padded):
        weight = corner[0][1]
        for _, factor in corner[1:]:
            weight = weight * factor
        part = gather(X, [index for index, _ in corner]) * weight[:, None]
        total = part if total is None else total + part
    assert total is not None
    return total


def linear_taps(place: Tensor) -> Taps:
    """The two neighbors of a place along one axis."""
    below = place.floor()
    share = place - below
    index = below.to(torch.int64)
    return [(index, 1 - share), (index + 1, share)]


def cubic_taps(place: Tensor, a: float = -0.75) -> Taps:
    """The four neighbors of a place along one axis, by Keys' kernel, https://doi.org/10.1109/TASSP.1981.1163711."""
    below = place.floor()
    t = place - below
    index = below.to(torch.int64)

    def near(x: Tensor) -> Tensor:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Tensor) -> Tensor:
        return ((x - 5) * x + 8) * x * a - 4 * a

    return [(index - 1, far(t + 1)), (index, near(t)), (index + 1, near(1 - t)), (index + 2, far(2 - t))]


def nearest_taps(place: Tensor) -> Taps:
    """The nearest element along one axis; from the middle between two, the even one."""
    return [(place.round().to(torch.int64), torch.ones_like(place))]


def pad_with_zeros(X: Tensor) -> Callable[[Tensor, int], tuple[Tensor, Tensor | None]]:
    """For `sample`: elements outside of X count nothing."""

    def pad(index: Tensor, axis: int) -> tuple[Tensor, Tensor | None]:
        last = X.shape[2 + axis] - 1
        return index.clamp(0, last), (index >= 0) & (index <= last)

    return pad
