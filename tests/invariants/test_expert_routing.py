"""However a router chooses, all ranks that share experts issue the same collectives, and results equal one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from onward.lowering.ops.fused_experts import experts
from tests.invariants.rank_pool import call_on_ranks

RANKS, EXPERTS, CHOICES, WIDTH, HIDDEN = 2, 4, 2, 3, 5
Choices = list[list[list[int]]]

ROUTINGS: dict[str, Choices] = {
    "all tokens to one rank": [[[0, 1], [1, 0], [0, 1]], [[1, 0], [0, 1]]],
    "all tokens to one expert": [[[3, 3]], [[3, 3], [3, 3]]],
    "a rank without tokens": [[], [[0, 3], [2, 1]]],
    "no tokens at all": [[], []],
    "no token of a rank to its own experts": [[[2, 3], [3, 2]], [[0, 1], [1, 0]]],
    "one token": [[[1, 2]], []],
}


def drawn(seed: int) -> Choices:
    """Any number of tokens a rank; no expert twice for a token."""
    random = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 6, (RANKS,), generator=random).tolist()
    return [[torch.randperm(EXPERTS, generator=random)[:CHOICES].tolist() for _ in range(n)] for n in counts]


def made(choices: Choices) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Tokens and shares of every rank, and both stacks of weights."""
    random = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(shape, generator=random, dtype=torch.float64)  # noqa: E731
    tokens, shares = ([draw(len(own), n) for own in choices] for n in (WIDTH, CHOICES))
    return tokens, shares, [draw(EXPERTS, WIDTH, HIDDEN), draw(EXPERTS, HIDDEN, WIDTH)]


def on_a_rank(cases: list[tuple[Choices, tuple[str, str] | None, float | None]]) -> list[dict[str, Any]]:
    """For each case the collectives that this rank issued, its result and its gradients."""
    rank, issued = dist.get_rank(), list[tuple[int, bool]]()
    original, group = dist.all_to_all_single, dist.group.WORLD
    assert group is not None

    def recording(output: Tensor, *more: Any, **named: Any) -> Any:
        issued.append((output.dim(), output.dtype.is_floating_point))
        return original(output, *more, **named)

    dist.all_to_all_single = recording
    found = []
    for choices, trained, factor in cases:
        issued.clear()
        tokens, shares, weights = made(choices)
        own = [stack.chunk(RANKS)[rank].clone() for stack in weights]
        leaves = {"x": tokens[rank], "shares": shares[rank], "up": own[0], "down": own[1]}
        wanted = [] if trained is None else trained[rank].split()
        for name in wanted:
            leaves[name].requires_grad_()
        chosen = torch.tensor(choices[rank], dtype=torch.int64).view(-1, CHOICES)
        with torch.set_grad_enabled(trained is not None):
            result = experts(
                leaves["x"], chosen, leaves["shares"], *own, experts=EXPERTS, activation="tanh", capacity_factor=factor,
                expert_size=RANKS, expert_group=group.group_name, training=True,
            )  # fmt: skip
            if trained is not None:
                result.square().sum().backward()
        found.append({"issued": list(issued), "result": result.detach(), **{n: leaves[n].grad for n in wanted}})
    dist.all_to_all_single = original
    return found


def by_hand(choices: Choices, factor: float | None) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
    """Every token through its experts, one at a time, in one process."""
    tokens, shares, weights = made(choices)
    leaves = [*tokens, *shares, *weights]
    for leaf in leaves:
        leaf.requires_grad_()
    results = []
    for x, share, own in zip(tokens, shares, choices, strict=True):
        most = None if factor is None else -(-factor * len(own) * CHOICES // EXPERTS)
        taken, rows = [0] * EXPERTS, []
        for token, chosen in enumerate(own):
            row = torch.zeros(WIDTH, dtype=torch.float64)
            for choice, e in enumerate(chosen):
                taken[e] += 1
                if most is None or taken[e] <= most:
                    row = row + share[token, choice] * (torch.tanh(x[token] @ weights[0][e]) @ weights[1][e])
            rows.append(row)
        results.append(torch.stack(rows) if rows else x.new_zeros(0, WIDTH))
    total = torch.stack([result.square().sum() for result in results]).sum()
    if not total.requires_grad:
        gradients = tuple(torch.zeros_like(leaf) for leaf in leaves)
    else:
        gradients = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    halves = [list(gradient.chunk(RANKS)) for gradient in gradients[-2:]]
    of = {"x": gradients[:RANKS], "shares": gradients[RANKS:-2], "up": halves[0], "down": halves[1]}
    return [result.detach() for result in results], {name: list(given) for name, given in of.items()}


TRAINED = {
    "all": ("x shares up down",) * 2, "experts of one rank": ("up down", ""), "one matrix of the other": ("", "down"),
    "shares": ("shares",) * 2, "tokens, and experts of one rank": ("x", "x up"), "nothing": ("", ""),
    "evaluation": None,
}  # fmt: skip


def prefixed(name: str) -> Callable[[str], str]:
    """Adds which case it is to what torch says."""
    return lambda text: f"{name}: {text}"


def test_all_ranks_issue_the_same_collectives_and_equal_one_process() -> None:
    routings = {**ROUTINGS, **{f"drawn {seed}": drawn(seed) for seed in range(6)}}
    cases = {
        f"{name}; trained: {what}; capacity {factor}": (choices, trained, factor)
        for name, choices in routings.items()
        for what, trained in TRAINED.items()
        for factor in (None, 0.5)
    }
    of_ranks = call_on_ranks(RANKS, on_a_rank, list(cases.values()))
    for name, (choices, trained, factor), *both in zip(cases, cases.values(), *of_ranks, strict=True):
        assert both[0]["issued"] == both[1]["issued"], name
        # The counts, tokens to their experts, results back, and the gradients of both.
        assert len(both[0]["issued"]) == (3 if trained is None else 5), name
        results, gradients = by_hand(choices, factor)
        for rank, found in enumerate(both):
            torch.testing.assert_close(found["result"], results[rank], msg=prefixed(name))
            for kind in () if trained is None else trained[rank].split():
                torch.testing.assert_close(found[kind], gradients[kind][rank], msg=prefixed(name))


@pytest.mark.parametrize("rows", [0, 3])
def test_one_process_without_tokens(rows: int) -> None:
    """A micro-batch may have no tokens for a mixture behind a choice of rows."""
    x, shares = torch.randn(rows, WIDTH, requires_grad=True), torch.rand(rows, CHOICES)
    chosen = torch.zeros(rows, CHOICES, dtype=torch.int64)
    up, down = torch.randn(EXPERTS, WIDTH, HIDDEN, requires_grad=True), torch.randn(EXPERTS, HIDDEN, WIDTH)
    result = experts(x, chosen, shares, up, down, experts=EXPERTS, activation="relu", training=True)
    result.sum().backward()
    assert x.grad is not None
    assert up.grad is not None
    expected = shares.sum(1, keepdim=True) * (F.relu(x @ up[0]) @ down[0])
    torch.testing.assert_close(result, expected)
    assert bool(up.grad[1:].eq(0).all())
