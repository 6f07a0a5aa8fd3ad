"""Operators of sequence parallelism: values of which every rank has the same number of tokens, along `cut_axis`.

Korthikanti et al., 2022 (Reducing Activation Recomputation in Large Transformer Models), section 4.2.2, figure 5.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onward.lowering.passes import only_first_derivative
from onward.lowering.registry import lowers
from onward.parallel.horizontal.collectives import all_gather, reduce_scatter
from onward.plan.horizontal.cuts import DOMAIN


def _own(x: Tensor, axis: int, rank: int, size: int) -> Tensor:
    length = _share_of(x, axis, size)
    return x.narrow(axis, rank * length, length)


def _all(x: Tensor, axis: int, size: int, group: str) -> Tensor:
    return torch.cat(all_gather(x, size, group).unbind(0), axis)


def _share_of(x: Tensor, axis: int, size: int) -> int:
    if x.shape[axis] % size:
        raise ValueError(
            f"{x.shape[axis]} tokens cannot be divided among {size} tensor-parallel ranks; pad the sequences to a "
            "multiple, or set distributed.sequence_parallel: false."
        )
    return x.shape[axis] // size


class _Move(torch.autograd.Function):
    """One collective for tokens forward, another one of their gradients backward."""

    @staticmethod
    def forward(x: Tensor, forward: str, backward: str, axis: int, rank: int, size: int, group: str) -> Tensor:
        """Runs the collective on tokens."""
        return _collective(x, forward, axis, rank, size, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keeps what to do backward."""
        ctx.settings = inputs[2:]

    @staticmethod
    @only_first_derivative
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        """Runs the opposite collective on gradients."""
        return _collective(gradients[0], *ctx.settings), None, None, None, None, None, None


def _collective(x: Tensor, kind: str, axis: int, rank: int, size: int, group: str) -> Tensor:
    if kind == "gather":
        return _all(x, axis, size, group)
    if kind == "own":
        return _own(x, axis, rank, size).clone()
    _share_of(x, axis, size)
    total: Tensor = reduce_scatter(x, axis, size, group)
    return total


@lowers("GatherTokens", domain=DOMAIN)
def gather_tokens(
    X: Tensor, *, cut_axis: int, blocks: tuple[int, ...], rank: int, size: int, partial: int = 0, horizontal_group: str
) -> Tensor:
    """All tokens; where every rank continues with a part of the features (`partial`), their gradients are added up."""
    backward = "sum" if partial else "own"
    return _Move.apply(X, "gather", backward, cut_axis, rank, size, horizontal_group)  # type: ignore[no-any-return,no-untyped-call]


@lowers("ReduceScatter", domain=DOMAIN)
def add_up_own_tokens(
    X: Tensor, *, cut_axis: int, blocks: tuple[int, ...], rank: int, size: int, horizontal_group: str
) -> Tensor:
    """The sums over the ranks of a rank's own tokens."""
    return _Move.apply(X, "sum", "gather", cut_axis, rank, size, horizontal_group)  # type: ignore[no-any-return,no-untyped-call]


@lowers("ScatterTokens", domain=DOMAIN)
def own_tokens(
    X: Tensor, *, cut_axis: int, blocks: tuple[int, ...], rank: int, size: int, horizontal_group: str
) -> Tensor:
    """A rank's tokens of a value that every rank has computed in full."""
    return _Move.apply(X, "own", "gather", cut_axis, rank, size, horizontal_group)  # type: ignore[no-any-return,no-untyped-call]
