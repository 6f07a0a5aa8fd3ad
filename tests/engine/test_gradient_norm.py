"""Norm and clipping of gradients, with the bits of torch's own functions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from onward.engine.gradient_norm import clip, norm_of_all, norm_of_each, total_norm


def weights(dtypes: tuple[torch.dtype, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for size, dtype in zip((3, 70, 1), dtypes, strict=True):
        weight = nn.Parameter(torch.zeros(size, 7, dtype=dtype))
        weight.grad = torch.randn(size, 7, generator=generator).to(dtype)
        found.append(weight)
    return found


ALIKE, MIXED = (torch.float32,) * 3, (torch.float32, torch.float64, torch.float32)


@pytest.mark.parametrize("dtypes", [ALIKE, MIXED])
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
@pytest.mark.parametrize("is_read", [True, False])
def test_the_bits_are_torchs_own(dtypes: tuple[torch.dtype, ...], max_norm: float, is_read: bool) -> None:
    own, theirs = weights(dtypes), weights(dtypes)
    norm = total_norm([weight.grad for weight in own if weight.grad is not None])
    assert torch.equal(norm, get_total_norm([weight.grad for weight in theirs if weight.grad is not None]))
    clip(own, max_norm, norm, is_read)
    clip_grads_with_norm_(theirs, max_norm, norm)
    for one, other in zip(own, theirs, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_nothing_has_no_norm_and_nan_reaches_the_gradients() -> None:
    assert total_norm([]).item() == 0.0
    clip([], 1.0, torch.tensor(2.0), True)
    own = weights(ALIKE)
    clip(own, 1.0, torch.tensor(math.nan), True)
    assert all(weight.grad is not None and weight.grad.isnan().all() for weight in own)


def test_norms_one_by_one_make_the_norm_of_all() -> None:
    gradients = [weight.grad for weight in weights(ALIKE) if weight.grad is not None]
    norms = [norm for gradient in gradients for norm in norm_of_each([gradient])]
    assert torch.equal(norm_of_all(norms), get_total_norm(gradients))
    assert norm_of_all([]).item() == 0.0
