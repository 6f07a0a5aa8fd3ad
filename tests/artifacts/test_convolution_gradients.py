"""Gradients of convolutions are those of torch's autograd, in each of their forms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onward.artifacts.convolution_gradients import convolution, convolution_backward

aten = torch.ops.aten


def drawn(size: Sequence[int], weight_size: Sequence[int], along: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """An input and a weight with their gradients, the result, and the gradient that it is given."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*size, dtype=torch.double, generator=generator, requires_grad=True)
    weight = torch.randn(*weight_size, dtype=torch.double, generator=generator, requires_grad=True)
    y = aten.convolution(x, weight, None, *along)
    gradient = torch.randn(y.shape, dtype=torch.double, generator=generator)
    y.backward(gradient)
    return x, weight, y, gradient


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
    sizes = (channels, 16) if transposed else (16, channels)
    along = ([stride] * 2, [padding] * 2, [dilation] * 2, transposed, [0, 0], 1)
    x, weight, _, gradient = drawn((2, channels, 11, 10), (*sizes, *kernel), along)
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


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "dilation"),
    [
        ((11, 10), (3, 3), 1, 1, 1),
        ((9, 20), (5, 3), 2, 2, 1),
        ((12, 14), (3, 2), 1, 0, 2),
        ((1, 16), (3, 3), 1, 1, 1),  # rows of the kernel that read nothing but padding
        ((8, 80), (3, 3), 1, 1, 1),  # long rows: a convolution
        ((5, 5), (3, 3), 1, 1, 1),  # small planes: the product of all their places
        ((6, 7), (3, 2), 2, 1, 1),
        ((7, 6), (3, 3), 1, 2, 2),
        ((1, 1), (3, 3), 1, 1, 1),
    ],
)
def test_gradients_of_depthwise_convolutions_are_autograds(
    size: tuple[int, int], kernel: tuple[int, int], stride: int, padding: int, dilation: int
) -> None:
    along = ([stride] * 2, [padding] * 2, [dilation] * 2, False, [0, 0], 3)
    x, weight, y, gradient = drawn((2, 3, *size), (3, 1, *kernel), along)
    own = convolution(x.detach(), weight.detach(), torch.ones(3, dtype=torch.double), *along)
    assert (own is NotImplemented) == (math.prod((*size, *y.shape[2:], *kernel)) > 40_000)
    assert own is NotImplemented or (own - 1 - y).abs().max() < 1e-11
    of_x, found, _ = convolution_backward(
        gradient, x.detach(), weight.detach(), None, *along, output_mask=[True, True, False]
    )
    assert found is not None
    assert of_x is not None
    assert weight.grad is not None
    assert x.grad is not None
    assert (found - weight.grad).abs().max() < 1e-11
    assert (of_x - x.grad).abs().max() < 1e-11


class _RefusesEmptyTensors(TorchDispatchMode):
    """Fails where an operator is given a tensor without elements, as ONNX Runtime does at some."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert all(one.numel() for one in args if isinstance(one, torch.Tensor)), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("rows", "kernel", "padding"), [(1, 3, 1), (2, 5, 4)])
def test_rows_of_a_kernel_that_read_only_padding_are_no_empty_products(rows: int, kernel: int, padding: int) -> None:
    x, weight = torch.ones(2, 3, rows, 16), torch.ones(3, 1, kernel, 3)
    along = ([2, 1], [padding, 1], [1, 1], False, [0, 0], 3)
    gradient = torch.ones_like(aten.convolution(x, weight, None, *along))
    with _RefusesEmptyTensors():
        _, found, _ = convolution_backward(gradient, x, weight, None, *along, output_mask=[False, True, False])
    assert found is not None
    assert torch.equal(found, aten.convolution_backward(gradient, x, weight, None, *along, [False, True, False])[1])


def test_gradients_of_transposed_convolutions_have_the_inputs_size() -> None:
    x, weight = torch.randn(1, 2, 7, dtype=torch.double), torch.randn(2, 3, 3, dtype=torch.double)
    along = ([1], [0], [2], True, [1], 1)  # more output_padding than the stride
    gradient = torch.ones_like(aten.convolution(x, weight, None, *along))
    found, _, _ = convolution_backward(gradient, x, weight, None, *along, output_mask=[True, False, False])
    expected, *_ = aten.convolution_backward(gradient, x, weight, None, *along, [True, False, False])
    assert found is not None
    assert torch.allclose(found, expected)


def test_other_convolutions_are_left_to_the_runtime() -> None:
    along = ([1, 1], [1, 1], [1, 1])
    x = torch.ones(2, 4, 5, 5)
    assert convolution(x, torch.ones(4, 4, 3, 3), None, *along, False, [0, 0], 1) is NotImplemented
    assert convolution(x, torch.ones(4, 2, 3, 3), None, *along, False, [0, 0], 2) is NotImplemented
    assert convolution(x, torch.ones(8, 1, 3, 3), None, *along, False, [0, 0], 4) is NotImplemented
    assert convolution(x, torch.ones(4, 1, 3, 3), None, *along, True, [0, 0], 4) is NotImplemented
