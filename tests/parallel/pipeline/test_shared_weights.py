"""Gradients of weights on several stages become their sum, the same everywhere."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from onward.parallel.pipeline.shared_weights import sum_shared_gradients
from tests.ranks import run_on_ranks

RANKS = (0, 1, 1, 0)
"""Four stages in a V on two ranks."""
SHARED = {"everywhere": (0, 1, 3), "on_one": (0, 3), "apart": (1, 3), "untouched": (0, 1)}


def weight(stage: int, name: str) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(2, 3))
    generator = torch.Generator().manual_seed(100 * stage + len(name))
    if name != "untouched":
        made.grad = torch.randn(2, 3, generator=generator)
    return made


def on_rank() -> dict[tuple[int, str], torch.Tensor | None]:
    group = dist.group.WORLD
    assert group is not None
    own = [stage for stage in range(4) if RANKS[stage] == dist.get_rank()]
    held = {stage: ["alone", *(name for name, stages in SHARED.items() if stage in stages)] for stage in own}
    weights = {stage: {name: weight(stage, name) for name in names} for stage, names in held.items()}
    sum_shared_gradients(SHARED, weights, RANKS, group)
    return {(stage, name): one.grad for stage, found in weights.items() for name, one in found.items()}


def same_tensor_on_rank() -> torch.Tensor | None:
    group = dist.group.WORLD
    assert group is not None
    one = nn.Parameter(torch.zeros(2))
    one.grad = torch.tensor([1.0, 2.0]) * (dist.get_rank() + 1)
    stages = [stage for stage in range(4) if RANKS[stage] == dist.get_rank()]
    sum_shared_gradients({"w": (0, 1, 2, 3)}, {stage: {"w": one} for stage in stages}, RANKS, group)
    return one.grad


def test_all_copies_have_the_same_sum() -> None:
    found: dict[tuple[int, str], torch.Tensor | None] = {}
    for rank in run_on_ranks(2, on_rank):
        found |= rank
    for name, stages in SHARED.items():
        if name == "untouched":
            expected = torch.zeros(2, 3)
        else:
            expected = sum((weight(stage, name).grad for stage in stages), torch.zeros(2, 3))  # type: ignore[misc]
        first = found[stages[0], name]
        assert first is not None
        torch.testing.assert_close(first, expected)
        for stage in stages:
            copy = found[stage, name]
            assert copy is not None
            assert torch.equal(copy, first)
    for stage in range(4):
        alone = found[stage, "alone"]
        assert alone is not None
        assert torch.equal(alone, weight(stage, "alone").grad)  # type: ignore[arg-type]


def test_one_tensor_on_two_stages_of_a_rank_counts_once() -> None:
    for gradient in run_on_ranks(2, same_tensor_on_rank):
        assert gradient is not None
        assert gradient.tolist() == [3.0, 6.0]
