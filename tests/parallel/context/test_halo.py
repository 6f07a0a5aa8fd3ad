"""A convolution of widened chunks is that of the full sequence, and so are its gradients."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F

from onward.parallel.context.collectives import own_part
from onward.parallel.context.halo import read_neighbours, trim
from onward.plan.context.ranges import TokenAxis
from tests.ranks import run_on_ranks


def shares() -> list[float]:
    """On one rank: the largest differences of results and gradients, for kernels, dilations, sides, and lengths."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is not None
    group = str(dist.group.WORLD.group_name)
    found = []
    for length, (before, after), dilation in itertools.product((13, 16, 25), ((2, 0), (1, 1), (0, 2)), (1, 2)):
        before, after = before * dilation, after * dilation
        if max(before, after) > -(-length // (2 * size)):
            continue
        g = torch.Generator().manual_seed(length)
        full, kernel = (torch.randn(shape, generator=g).double() for shape in ((2, 3, length), (4, 3, 3)))
        factors = [torch.randn(2, 4, length, generator=g).double() for _ in range(size)]
        x, w = full.clone().requires_grad_(), kernel.clone().requires_grad_()
        expected = F.conv1d(F.pad(x, (before, after)), w, dilation=dilation)
        tokens, settings = (
            TokenAxis((length,)),
            {"cut_axis": 2, "blocks": (length,), "ranks": size, "context_rank": rank},
        )
        sum(
            (own_part(expected * f, 2, tokens, r, size).sum() for r, f in enumerate(factors)), x.new_zeros(())
        ).backward()
        own, own_w = own_part(full, 2, tokens, rank, size).clone().requires_grad_(), kernel.clone().requires_grad_()
        wide = read_neighbours(own, before=before, after=after, context_group=group, **settings)  # type: ignore[arg-type]
        y = trim(F.conv1d(wide, own_w, dilation=dilation), excess=before + after, **settings)  # type: ignore[arg-type]
        (y * own_part(factors[rank], 2, tokens, rank, size)).sum().backward()
        assert x.grad is not None
        assert own.grad is not None
        assert own_w.grad is not None
        dist.all_reduce(own_w.grad)
        pairs = (
            (y, own_part(expected, 2, tokens, rank, size)),
            (own.grad, own_part(x.grad, 2, tokens, rank, size)),
            (own_w.grad, w.grad),
        )
        found += [float((a - b).abs().max()) for a, b in pairs]  # type: ignore[operator]
    return found


def test_neighbours_of_chunks_give_the_convolution_of_the_sequence() -> None:
    for found in run_on_ranks(3, shares):
        assert len(found) == 3 * 14
        assert max(found) < 1e-12
