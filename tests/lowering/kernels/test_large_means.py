"""Channels-last images whose mean is large against their deviation are normalized without losing digits."""

from __future__ import annotations

import pytest
import torch

from onward.lowering.kernels.large_means import are_large, group_norm, may_lose_digits, without_mean

IMAGE = torch.randn(2, 4, 5, 3, generator=torch.Generator().manual_seed(0))
LAST = IMAGE.contiguous(memory_format=torch.channels_last)


def test_only_dense_channels_last_images_of_a_cpu_are_in_danger() -> None:
    assert may_lose_digits(LAST)
    assert not may_lose_digits(IMAGE)
    assert not may_lose_digits(LAST.to(torch.bfloat16))
    assert not may_lose_digits(LAST[:0])
    assert not may_lose_digits(torch.zeros(3, 4).t())


@pytest.mark.parametrize(("mean", "large"), [(2.0, False), (-2.1, True), (float("nan"), True)])
def test_means_are_compared_with_deviations(mean: float, large: bool) -> None:
    assert are_large(torch.tensor([0.0, mean]), torch.ones(2)) is large


def test_a_large_mean_is_subtracted_and_a_small_one_is_not() -> None:
    mean = torch.tensor([1e4, 0.0, 0.0, 0.0])
    shifted = without_mean(LAST, mean, torch.ones(4))
    assert shifted is not None
    torch.testing.assert_close(shifted, LAST - mean.reshape(4, 1, 1))
    assert without_mean(LAST, torch.zeros(4), torch.ones(4)) is None
    assert without_mean(IMAGE, mean, torch.ones(4)) is None


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_groups_equal_those_of_float64(offset: float) -> None:
    scale, bias = torch.rand(4), torch.rand(4)
    image = (LAST + offset).contiguous(memory_format=torch.channels_last)
    expected = torch.group_norm(image.double().contiguous(), 2, scale.double(), bias.double(), 1e-5)
    torch.testing.assert_close(group_norm(image, 2, scale, bias, 1e-5).double(), expected, rtol=0, atol=3e-3)
