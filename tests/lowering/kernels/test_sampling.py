"""Reading between elements: taps sum to one, and places equal torch's interpolation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from onward.lowering.kernels.sampling import cubic_taps, gather, linear_taps, nearest_taps, pad_with_zeros, sample

PLACES = torch.tensor([[-0.75, 0.0, 0.5, 1.25, 2.5, 3.0, 3.5]])


@pytest.mark.parametrize("taps", [linear_taps, cubic_taps, nearest_taps])
def test_weights_sum_to_one(taps: object) -> None:
    assert callable(taps)
    total = sum(weight for _, weight in taps(PLACES))
    torch.testing.assert_close(total, torch.ones_like(PLACES))


def test_the_middle_is_rounded_to_the_even_element() -> None:
    ((index, _),) = nearest_taps(PLACES)
    assert index.tolist() == [[-1, 0, 0, 1, 2, 3, 4]]


def test_elements_at_integer_places_of_two_axes() -> None:
    x = torch.arange(24.0).reshape(1, 2, 3, 4)
    found = gather(x, [torch.tensor([[2, 0]]), torch.tensor([[3, 1]])])
    assert found.tolist() == [[[11.0, 1.0], [23.0, 13.0]]]


TAPS = {"bilinear": linear_taps, "bicubic": cubic_taps, "nearest": nearest_taps}


@pytest.mark.parametrize("mode", TAPS)
def test_an_image_is_sampled_as_torch_does(mode: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 5, 6, generator=generator, dtype=torch.float64)
    grid = torch.rand(2, 4, 4, 2, generator=generator, dtype=torch.float64) * 2.4 - 1.2  # some of them outside
    expected = F.grid_sample(x, grid, mode=mode, padding_mode="zeros", align_corners=True)
    places = [(grid[..., 1 - axis].flatten(1) + 1) / 2 * (x.shape[2 + axis] - 1) for axis in range(2)]
    found = sample(x, [TAPS[mode](place) for place in places], pad_with_zeros(x))
    torch.testing.assert_close(found.reshape(expected.shape), expected)
