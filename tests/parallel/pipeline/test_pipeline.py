"""A pipeline computes what one process computes: losses, gradients, running statistics, evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.parallel.pipelines import (
    STAGES_PER_RANK,
    Outcome,
    batches,
    by_every_schedule,
    difference,
    in_one_process,
)
from tests.plan.staged_models import graph_of
from tests.ranks import run_on_ranks

WATCHED = {"gpt2": ("logits", "loss", "loss/correct"), "bert": ("output1", "mlm_loss", "nsp_loss"),
           "u_net": ("image", "down0"), "squeezenet": ("logits",), "mlp": ("logits", "relu0")}  # fmt: skip
BOUND = 1e-5


def compare(name: str, outcomes: Sequence[Outcome], alone: Outcome, bound: float = BOUND) -> None:
    """Asserts that what all ranks of a pipeline have is what one process has, relative to each tensor's largest value,
    and that copies of a weight's gradient are the same bit by bit."""
    seen: dict[str, torch.Tensor] = {}
    for outcome in outcomes:
        assert difference(outcome.losses, alone.losses) < bound
        for watched, value in alone.values.items():
            assert difference(outcome.values[watched].float(), value.float()) < bound
        for weight, gradient in outcome.gradients.items():
            assert difference(gradient, alone.gradients[weight]) < bound, weight
            assert weight not in seen or torch.equal(seen[weight], gradient), f"copies of {weight} differ"
            seen[weight] = gradient
        for state, value in outcome.states.items():
            assert difference(value, alone.states[state]) < bound, state
    assert set(seen) == set(graph_of(name).weights)


def agree(name: str, world: int, micro_batches: int) -> None:
    features = batches(name, micro_batches)
    factors = torch.linspace(0.5, 1.5, micro_batches) / micro_batches
    alone = in_one_process(name, features, factors, WATCHED[name])
    ranks: list[list[Outcome]] = run_on_ranks(world, by_every_schedule, name, features, factors, WATCHED[name])
    for index in range(len(STAGES_PER_RANK)):
        compare(name, [outcomes[index] for outcomes in ranks], alone)


QUICK = ("mlp", "u_net")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in WATCHED])
def test_two_ranks_compute_what_one_does_under_every_schedule(name: str) -> None:
    agree(name, 2, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert", "squeezenet", "u_net"])
def test_four_ranks_compute_what_one_does_under_every_schedule(name: str) -> None:
    agree(name, 4, 8)
