"""Sliding windows over the spatial axes, shared by convolution and pooling: kernel, stride, dilation and padding.

Legend: N batch, C channels, D1...Dn the n spatial axes of an (N, C, D1, ..., Dn) tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

AUTO_PADS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")


@dataclass(frozen=True, kw_only=True)
class Windows:
    """One entry per spatial axis; sizes in elements.

    `sizes` counts the windows along each axis, which is the output's shape; `end` may be negative or smaller than
    what the last window covers: see `covering_end`.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def symmetric(self) -> bool:
        """Whether each axis is padded alike on both sides."""
        return self.begin == self.end

    def covering_end(self, spatial: Sequence[int]) -> tuple[int, ...]:
        """Padding at the end of each axis with which the last window ends exactly at the padded end."""
        return tuple(
            (count - 1) * s + (k - 1) * d + 1 - size - b
            for count, s, k, d, size, b in zip(
                self.sizes, self.stride, self.kernel, self.dilation, spatial, self.begin, strict=True
            )
        )


def lay_windows(
    spatial: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int] | None,
    dilations: Sequence[int] | None,
    pads: Sequence[int] | None,
    auto_pad: str,
    ceil_mode: bool = False,
) -> Windows:
    """Resolves the attributes that Conv and the pooling operators share.

    Args:
        spatial: sizes of the input's spatial axes.
        kernel: sizes of the kernel.
        pads: `[begin of axis 1, ..., begin of axis n, end of axis 1, ..., end of axis n]`.
        auto_pad: NOTSET, SAME_UPPER, SAME_LOWER or VALID.
        ceil_mode: a last window may reach over the padded end, if it starts before the padding at the end.

    Raises:
        ValueError: an attribute has the wrong number of entries, or the kernel is larger than the padded input.
    """
    n = len(spatial)
    stride = per_axis("strides", strides, n)
    dilation = per_axis("dilations", dilations, n)
    check_length("kernel_shape", kernel, n)
    if auto_pad not in AUTO_PADS:
        raise ValueError(f"auto_pad is {auto_pad!r}; expected one of {', '.join(AUTO_PADS)}.")
    begin, end = split_pads(pads, n)
    if auto_pad != "NOTSET":
        begin, end = (0,) * n, (0,) * n
    if auto_pad.startswith("SAME"):
        totals = [
            max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
            for size, k, s, d in zip(spatial, kernel, stride, dilation, strict=True)
        ]
        begin, end = split_total(totals, auto_pad)
    sizes = tuple(
        _count(size, k, s, d, b, e, ceil_mode)
        for size, k, s, d, b, e in zip(spatial, kernel, stride, dilation, begin, end, strict=True)
    )
    return Windows(kernel=tuple(kernel), stride=stride, dilation=dilation, begin=begin, end=end, sizes=sizes)


def _count(size: int, kernel: int, stride: int, dilation: int, begin: int, end: int, ceil_mode: bool) -> int:
    free = size + begin + end - (kernel - 1) * dilation - 1
    if not ceil_mode:
        if free < 0:
            raise ValueError(
                f"a kernel of {kernel} (dilation {dilation}) is larger than an axis of {size} elements padded by "
                f"{begin} and {end}."
            )
        return free // stride + 1
    count = -(-free // stride) + 1
    if (count - 1) * stride >= size + begin:
        count -= 1
    if count < 1:
        raise ValueError(
            f"a kernel of {kernel} (dilation {dilation}) finds no place on an axis of {size} elements padded by "
            f"{begin} and {end}."
        )
    return count


def per_axis(name: str, values: Sequence[int] | None, n: int) -> tuple[int, ...]:
    """An attribute with one positive entry per spatial axis; ones if absent."""
    if not values:
        return (1,) * n
    check_length(name, values, n)
    if min(values) < 1:
        raise ValueError(f"{name} is {list(values)}; every entry must be at least 1.")
    return tuple(values)


def check_length(name: str, values: Sequence[int], n: int) -> None:
    """Raises ValueError unless there is one entry per spatial axis."""
    if len(values) != n:
        raise ValueError(f"{name} is {list(values)}; the input has {n} spatial axes, so {n} entries are expected.")


def split_pads(pads: Sequence[int] | None, n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`pads` as (at the beginning, at the end) of each axis."""
    if not pads:
        return (0,) * n, (0,) * n
    if len(pads) != 2 * n:
        raise ValueError(f"pads is {list(pads)}; {n} spatial axes need {2 * n} entries, all beginnings first.")
    return tuple(pads[:n]), tuple(pads[n:])


def split_total(totals: Sequence[int], auto_pad: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Divides each axis's padding between both sides; SAME_LOWER puts an odd one at the beginning."""
    small = tuple(total // 2 for total in totals)
    large = tuple(total - total // 2 for total in totals)
    return (large, small) if auto_pad == "SAME_LOWER" else (small, large)


def pad_spatial(x: Tensor, begin: Sequence[int], end: Sequence[int], value: float = 0.0) -> Tensor:
    """Pads the trailing `len(begin)` axes with a constant; negative amounts cut off."""
    if not any(begin) and not any(end):
        return x
    amounts = [amount for b, e in zip(reversed(begin), reversed(end), strict=True) for amount in (b, e)]
    return F.pad(x, amounts, value=value)
