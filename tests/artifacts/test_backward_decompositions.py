"""Gradients of poolings and clipped activations are those of torch's autograd, in each of their forms."""

from __future__ import annotations

import pytest
import torch

from onward.artifacts.backward_decompositions import backward_decompositions

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("shape", "kernel", "stride", "padding"),
    [
        ((2, 3, 6, 8), [2, 2], [2, 2], [0, 0]),  # disjoint windows: comparisons
        ((2, 3, 7, 11), [2, 3], [], [0, 0]),  # rows that no window reaches
        ((2, 3, 7, 8), [3, 3], [2, 2], [1, 1]),  # windows that overlap: indices
        ((2, 3, 4, 6, 6), [2, 3, 2], [2, 3, 2], [0, 0, 0]),
    ],
)
def test_gradients_of_poolings_go_to_the_first_of_equal_maxima(
    shape: tuple[int, ...], kernel: list[int], stride: list[int], padding: list[int]
) -> None:
    axes, generator = len(kernel), torch.Generator().manual_seed(0)
    pool = aten.max_pool2d_with_indices if axes == 2 else aten.max_pool3d_with_indices
    x = torch.randint(-1, 3, shape, generator=generator).double().requires_grad_()  # with many equal elements
    y, indices = pool(x, kernel, stride, padding)
    gradient = torch.randn(y.shape, dtype=torch.double, generator=generator)
    y.backward(gradient)
    backward = aten.max_pool2d_with_indices_backward if axes == 2 else aten.max_pool3d_with_indices_backward
    decomposed = backward_decompositions()[backward.default]
    found = decomposed(gradient, x.detach(), kernel, stride, padding, [1], False, indices)
    assert x.grad is not None
    assert torch.equal(found, x.grad)


def test_gradients_of_clipped_activations_are_autograds() -> None:
    x = torch.tensor([-3.0, -1e-30, 0.0, 1e-30, 0.5, 5.9999995, 6.0, 6.0000005, 1e30], requires_grad=True)
    gradient = torch.arange(1.0, 10.0)
    table = backward_decompositions()
    for function, backward, bounds in (
        (torch.relu, aten.threshold_backward.default, (0,)),
        (lambda value: torch.nn.functional.threshold(value, 0.5, 0.0), aten.threshold_backward.default, (0.5,)),
        (torch.nn.functional.relu6, aten.hardtanh_backward.default, (0.0, 6.0)),
        (lambda value: torch.nn.functional.hardtanh(value, -1.0, 2.0), aten.hardtanh_backward.default, (-1.0, 2.0)),
    ):
        (wanted,) = torch.autograd.grad(function(x), x, gradient)
        assert torch.equal(table[backward](gradient, x.detach(), *bounds), wanted), bounds


def test_masks_of_the_smallest_half_floats_are_one() -> None:
    x = torch.tensor([-6e-8, 0.0, 6e-8, 1e-6, 1e-5, 1.0], dtype=torch.float16)
    masks = backward_decompositions()
    for operator, bounds in ((aten.threshold_backward.default, (0,)), (aten.hardtanh_backward.default, (0.0, 6.0))):
        assert masks[operator](torch.ones_like(x), x, *bounds).tolist() == [0, 0, 1, 1, 1, 1]


def test_infinite_gradients_do_not_pass_a_clipped_activation() -> None:
    gradient, x = torch.tensor([torch.inf, torch.nan, 2.0]), torch.tensor([-1.0, 0.0, 1.0])
    masks = backward_decompositions(may_be_infinite=True)
    for operator, bounds in ((aten.threshold_backward.default, (0,)), (aten.hardtanh_backward.default, (0.0, 6.0))):
        assert masks[operator](gradient, x, *bounds).tolist() == [0, 0, 2]
