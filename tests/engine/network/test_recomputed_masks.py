"""Masks are made again in the backward pass: none is handed over, and gradients are the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onward.engine.network.recomputed_masks import RecomputedMasks
from tests.engine.network.partitions import run_cut

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: F.relu(x + 1) * 2,
    "leaky relu": lambda x: F.leaky_relu(x + 1, 0.1) * 2,
    "bounds": lambda x: (x + 1).clamp(-0.5, 0.5) * 2,
    "a choice": lambda x: torch.where((x > 0) & ~(x > 1), x * 2, x * 3),
    "dropout": lambda x: F.dropout(x.sin(), 0.5) * 2,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_mask_is_handed_over(name: str) -> None:
    x = torch.linspace(-3, 3, 40).view(4, 10).requires_grad_()
    marked, before = run_cut(FUNCTIONS[name], [x], RecomputedMasks()), run_cut(FUNCTIONS[name], [x])
    assert torch.bool in {one.dtype for one in before.handed}  # what would be written element by element
    assert torch.bool not in {one.dtype for one in marked.handed}
    assert torch.equal(marked.result, before.result)
    assert torch.equal(marked.gradients[0], before.gradients[0])


def test_a_changed_pass_is_another_one_to_torchs_cache() -> None:
    assert RecomputedMasks().uuid() == RecomputedMasks().uuid()
    assert len(RecomputedMasks().uuid()) == 32
