"""What narrow products read is handed to the backward pass, what wide ones read is made again, with equal gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onward.engine.network.kept_operands import LEAST_MULTIPLICATIONS, KeptOperands
from tests.engine.network.partitions import run_cut


@dataclass(frozen=True)
class Example:
    """A function of x and a weight that multiplies sin(x), their shapes, and whether sin(x) is to be kept."""

    function: Callable[[Tensor, Tensor], Tensor]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    is_kept: bool
    trains_weight: bool = True


def _twice(x: Tensor, w: Tensor) -> Tensor:
    y = x.sin()
    return y @ w + y @ w.cos()


EXAMPLES = {
    "a narrow layer": Example(lambda x, w: x.sin() @ w, ((7, 8), (8, LEAST_MULTIPLICATIONS - 1)), True),
    "a wide layer": Example(lambda x, w: x.sin() @ w, ((7, 8), (8, LEAST_MULTIPLICATIONS)), False),
    "two layers, wide together": Example(_twice, ((7, 8), (8, LEAST_MULTIPLICATIONS // 2)), False),
    "two narrow layers": Example(_twice, ((7, 8), (8, LEAST_MULTIPLICATIONS // 2 - 1)), True),
    "behind views": Example(lambda x, w: x.sin().transpose(0, 1).reshape(-1, 4) @ w, ((7, 8), (4, 3)), True),
    "a narrow convolution": Example(lambda x, w: F.conv2d(x.sin(), w), ((2, 3, 8, 8), (4, 3, 3, 3)), True),
    "a wide convolution": Example(lambda x, w: F.conv2d(x.sin(), w), ((2, 3, 8, 8), (64, 3, 3, 3)), False),
    "a depthwise convolution": Example(
        lambda x, w: F.conv2d(x.sin(), w, groups=3), ((2, 3, 8, 8), (3, 1, 3, 3)), False
    ),
    "a frozen weight": Example(lambda x, w: x.sin() @ w, ((7, 8), (8, 3)), False, trains_weight=False),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_narrow_products_read_is_kept(name: str) -> None:
    example = EXAMPLES[name]
    x, w = (torch.randn(shape, requires_grad=True) for shape in example.shapes)
    w.requires_grad_(example.trains_weight)
    # As a run sets it whose `recompute.cheap_activations` is true.
    with torch._functorch.config.patch(ban_recompute_materialized_backward=False):
        marked, before = run_cut(example.function, [x, w], KeptOperands()), run_cut(example.function, [x, w])
    # Next to x itself, which the gradient of its sine needs.
    of_its_size, before_of_its_size = (
        sum(one.numel() == x.numel() for one in found.handed) for found in (marked, before)
    )
    assert before_of_its_size == 1
    assert of_its_size == 1 + example.is_kept
    assert torch.equal(marked.result, before.result)
    assert all(torch.equal(*pair) for pair in zip(marked.gradients, before.gradients, strict=True))


def test_a_changed_pass_is_another_one_to_torchs_cache() -> None:
    assert KeptOperands().uuid() == KeptOperands().uuid()
    assert len(KeptOperands().uuid()) == 32
