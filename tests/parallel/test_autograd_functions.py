"""Every `torch.autograd.Function` that exchanges something with other ranks, on 2 ranks, in float64.

A gradient is asked whether it is that of all ranks' objectives together, or of one objective that all ranks compute
alike, by finite differences of the exchange itself. Second derivatives are right, or refused in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onward.lowering.process_groups import exchange_rows, gather_over_group, sum_over_group
from onward.parallel.context import collectives as context
from onward.parallel.context.halo import _Stack
from onward.parallel.horizontal.collectives import EnterRegion, LeaveRegion
from onward.parallel.horizontal.loss import sharded_cross_entropy
from onward.parallel.horizontal.operators import _Gathered, sharded_log_softmax, sharded_softmax
from onward.parallel.horizontal.tokens import _Move
from onward.plan.context.ranges import TokenAxis
from onward.plan.shards import Sharding
from tests.ranks import run_on_ranks

RANKS = 2
BOUND = 1e-8
"""Of central differences with steps of 1e-5 in float64, for derivatives of about 1."""
ROWS = [[1, 2], [3, 1]]
"""Rows that each rank has for each."""


@dataclass(frozen=True)
class Exchange:
    """A function of ranks.

    Attributes:
        call: of a rank's tensor, the rank, and the group.
        shape: of a rank's tensor.
        is_same_before, is_same_after: whether all ranks have the same there, which counts once.
        second: whether it has second derivatives; else they are refused.
    """

    call: Callable[[Tensor, int, str], Tensor]
    shape: Callable[[int], tuple[int, ...]] = lambda rank: (4, 6)
    is_same_before: bool = False
    is_same_after: bool = False
    second: bool = False


def _sharded(call: Any) -> Callable[[Tensor, int, str], Tensor]:
    """Of the rank's part of 7 classes."""
    return lambda x, rank, group: call(x, cut_axis=1, blocks=(7,), rank=rank, size=RANKS, horizontal_group=group)


def _part(rank: int) -> tuple[int, ...]:
    return (4, (3, 4)[rank])


def _losses(x: Tensor, **options: Any) -> Tensor:
    labels = torch.tensor([6, 0, 3, 1])
    found: Tensor = sharded_cross_entropy(x, labels, ignore_index=3, reduction="none", output_count=1, **options)[0]
    return found


def _move(forward: str, backward: str) -> Callable[[Tensor, int, str], Tensor]:
    return lambda x, rank, group: _Move.apply(x, forward, backward, 1, rank, RANKS, group)


def _full(x: Tensor, rank: int, group: str) -> Tensor:
    found: Tensor = _Gathered.apply(x, Sharding(axis=1, blocks=(7,)), rank, RANKS, group)
    return found


TOKENS = TokenAxis((7,))
EXCHANGES: Mapping[str, tuple[str, Exchange]] = {
    "sum": ("process_groups._GroupSum", Exchange(lambda x, rank, group: sum_over_group(x, group), second=True)),
    "rows for each": ("process_groups._RowExchange", Exchange(
        lambda x, rank, group: exchange_rows(x, ROWS[rank], [row[rank] for row in ROWS], group),
        lambda rank: (sum(ROWS[rank]), 2), second=True)),
    "rows of all": ("process_groups._GroupGather", Exchange(
        lambda x, rank, group: gather_over_group(x, group), lambda rank: (2 + rank, 3))),
    "entering": ("parallel.horizontal.collectives.EnterRegion", Exchange(
        lambda x, rank, group: EnterRegion.apply(x, group) * (rank + 1.0), is_same_before=True)),
    "leaving": ("parallel.horizontal.collectives.LeaveRegion", Exchange(
        lambda x, rank, group: LeaveRegion.apply(x, group), is_same_after=True, second=True)),
    "softmax": ("parallel.horizontal.operators._Softmax", Exchange(_sharded(sharded_softmax), _part)),
    "log-softmax": ("parallel.horizontal.operators._Softmax", Exchange(_sharded(sharded_log_softmax), _part)),
    "cross entropy": ("parallel.horizontal.loss._RowLosses", Exchange(_sharded(_losses), _part, is_same_after=True)),
    "the full tensor": ("parallel.horizontal.operators._Gathered", Exchange(_full, _part, is_same_after=True)),
    "all tokens, each has all gradients": ("parallel.horizontal.tokens._Move", Exchange(
        _move("gather", "own"), is_same_after=True)),
    "all tokens, each has a part of gradients": ("parallel.horizontal.tokens._Move", Exchange(_move("gather", "sum"))),
    "own tokens of sums": ("parallel.horizontal.tokens._Move", Exchange(_move("sum", "gather"))),
    "own tokens": ("parallel.horizontal.tokens._Move", Exchange(_move("own", "gather"), is_same_before=True)),
    "all of a sequence": ("parallel.context.collectives._Gather", Exchange(
        lambda x, rank, group: context.gather(x, 1, TOKENS, RANKS, group),
        lambda rank: (2, TOKENS.local_length(rank, RANKS)))),
    "sum of a sequence": ("parallel.context.collectives._Sum", Exchange(
        lambda x, rank, group: context.add_up(x, group))),
    "edges": ("parallel.context.halo._Stack", Exchange(lambda x, rank, group: _Stack.apply(x, RANKS, group))),
}  # fmt: skip
ON_RANKS = {function for function, _ in EXCHANGES.values()}


def _total(value: Tensor, is_same: bool) -> float:
    """The sum over the ranks, of which one counts if all have the same."""
    counted = value.detach().clone()
    dist.all_reduce(counted)
    return float(counted) / (RANKS if is_same else 1)


def _drawn(shape: tuple[int, ...], seed: int, rank: int, is_same: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed + (0 if is_same else 100 * (rank + 1)))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _second(result: Tensor, x: Tensor, weight: Tensor, along: Tensor, expected: Tensor) -> str:
    """What becomes of the gradient's gradient; all that have one are linear, and it is the function itself."""
    try:
        (gradient,) = torch.autograd.grad(result, x, weight, create_graph=True)
        (back,) = torch.autograd.grad(gradient, weight, along)
    except RuntimeError as error:
        words = ("has no second derivative", "no autograd formula was registered")
        return "refused" if any(text in str(error) for text in words) else str(error)
    return "right" if torch.allclose(back, expected, rtol=1e-12) else "wrong"


def differences() -> dict[str, tuple[float, float, str]]:
    """For each exchange the derivative along a direction, by its backward pass and by differences, and the second."""
    rank, found = dist.get_rank(), {}
    assert dist.group.WORLD is not None
    group = str(dist.group.WORLD.group_name)
    for name, (_, one) in EXCHANGES.items():
        x, along = (_drawn(one.shape(rank), seed, rank, one.is_same_before) for seed in (1, 2))
        x = x.T.contiguous().T.requires_grad_()  # memory in another order
        result = one.call(x, rank, group)
        weight = _drawn(tuple(result.shape), 3, rank, one.is_same_after)
        (gradient,) = torch.autograd.grad(result, x, weight, retain_graph=True)
        by_gradient = _total((gradient * along).sum(), one.is_same_before)
        step = 1e-5
        ends = [(one.call(x.detach() + sign * step * along, rank, group) * weight).sum() for sign in (1, -1)]
        by_steps = (_total(ends[0], one.is_same_after) - _total(ends[1], one.is_same_after)) / (2 * step)
        own = weight.detach().requires_grad_()
        second = _second(result, x, own, along, along if name == "leaving" else one.call(along, rank, group).detach())
        found[name] = by_gradient, by_steps, second
    return found


def test_gradients_of_exchanges() -> None:
    for found in run_on_ranks(RANKS, differences):
        assert found.keys() == EXCHANGES.keys()
        for name, (by_gradient, by_steps, second) in found.items():
            assert abs(by_gradient - by_steps) <= BOUND * max(1.0, abs(by_steps)), (name, by_gradient, by_steps)
            assert second == ("right" if EXCHANGES[name][1].second else "refused"), (name, second)
