"""Gradients of convolutions, in each of the forms that they are written in, are those of torch's autograd."""

from __future__ import annotations

import pytest
import torch

from onward.artifacts.backward_decompositions import convolution_backward


@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "padding", "dilation", "transposed"),
    [
        (16, (3, 3), 2, 1, 1, False),  # matrix products
        (17, (1, 1), 1, 0, 1, False),  # the input's gradient is a convolution, too
        (16, (1, 1), 2, 0, 1, False),
        (20, (3, 2), 1, 1, 2, False),
        (16, (3, 3), 2, 1, 1, True),
        (3, (3, 3), 2, 1, 1, False),  # a convolution with the output's gradient: few channels
        (16, (7, 7), 1, 3, 1, False),  # and large kernels
    ],
)
def test_gradients_of_convolutions_are_autograds(
    channels: int, kernel: tuple[int, int], stride: int, padding: int, dilation: int, transposed: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, channels, 11, 10, dtype=torch.double, generator=generator, requires_grad=True)
    sizes = (channels, 16) if transposed else (16, channels)
    weight = torch.randn(*sizes, *kernel, dtype=torch.double, generator=generator, requires_grad=True)
    along = ([stride] * 2, [padding] * 2, [dilation] * 2, transposed, [0, 0], 1)
    y = torch.ops.aten.convolution(x, weight, None, *along)
    gradient = torch.randn(y.shape, dtype=torch.double, generator=generator)
    y.backward(gradient)
    of_x, of_weight, of_bias = convolution_backward(
        gradient, x.detach(), weight.detach(), None, *along, output_mask=[True, True, True]
    )
    assert of_x is not None
    assert of_weight is not None
    assert of_bias is not None
    assert x.grad is not None
    assert weight.grad is not None
    assert (of_x - x.grad).abs().max() < 1e-11
    assert (of_weight - weight.grad).abs().max() < 1e-11
    assert (of_bias - gradient.sum((0, 2, 3))).abs().max() < 1e-11
