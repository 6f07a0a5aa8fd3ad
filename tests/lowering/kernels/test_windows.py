"""Windows of convolutions and pools: how many there are, how they are padded, and what does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.lowering.kernels.windows import lay_windows, pad_spatial, split_total


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 3), st.integers(1, 2), st.integers(0, 2), st.booleans())
def test_as_many_as_torchs_pool_gives(
    size: int, kernel: int, stride: int, dilation: int, pad: int, ceil_mode: bool
) -> None:
    if (kernel - 1) * dilation + 1 > size + 2 * pad or pad > kernel // 2:
        return  # torch refuses these
    windows = lay_windows((size,), (kernel,), (stride,), (dilation,), (pad, pad), "NOTSET", ceil_mode)
    pooled = torch.nn.functional.max_pool1d(torch.zeros(1, 1, size), kernel, stride, pad, dilation, ceil_mode)
    assert windows.sizes == (pooled.shape[-1],)
    assert windows.symmetric
    (end,) = windows.covering_end((size,))
    last = (windows.sizes[0] - 1) * stride + (kernel - 1) * dilation + 1
    assert pad + size + end == last


@pytest.mark.parametrize(("auto_pad", "begin", "end"), [("SAME_UPPER", 1, 2), ("SAME_LOWER", 2, 1), ("VALID", 0, 0)])
def test_automatic_padding(auto_pad: str, begin: int, end: int) -> None:
    windows = lay_windows((7, 7), (4, 4), (1, 1), None, (9, 9, 9, 9), auto_pad)
    assert (windows.begin, windows.end) == ((begin,) * 2, (end,) * 2)
    assert windows.sizes == ((7, 7) if auto_pad != "VALID" else (4, 4))
    assert split_total([3], auto_pad if auto_pad != "VALID" else "SAME_UPPER")[0] == ((2,) if begin == 2 else (1,))


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "strides": ({"strides": (1,)}, r"strides is \[1\]; the input has 2 spatial axes, so 2 entries are expected"),
    "stride 0": ({"strides": (1, 0)}, r"strides is \[1, 0\]; every entry must be at least 1"),
    "kernel": ({"kernel": (3,)}, r"kernel_shape is \[3\]; the input has 2"),
    "pads": ({"pads": (1, 1)}, r"pads is \[1, 1\]; 2 spatial axes need 4 entries, all beginnings first"),
    "auto_pad": ({"auto_pad": "SAME"}, r"auto_pad is 'SAME'; expected one of NOTSET, SAME_UPPER, SAME_LOWER, VALID"),
    "too large": ({"kernel": (6, 3)}, r"a kernel of 6 \(dilation 1\) is larger than an axis of 5 elements padded by 0"),
    "no place": ({"kernel": (9, 3), "ceil_mode": True}, r"a kernel of 9 \(dilation 1\) finds no place on an axis of 5"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_does_not_fit(mistake: str) -> None:
    changed, words = MISTAKES[mistake]
    given = {"kernel": (3, 3), "strides": None, "dilations": None, "pads": None, "auto_pad": "NOTSET", **changed}
    with pytest.raises(ValueError, match=words):
        lay_windows((5, 5), **given)


def test_padding_and_cropping() -> None:
    x = torch.ones(1, 1, 2, 3)
    assert pad_spatial(x, (0, 0), (0, 0)) is x
    assert pad_spatial(x, (1, 0), (0, -1), 7.0).tolist() == [[[[7.0, 7.0], [1.0, 1.0], [1.0, 1.0]]]]
