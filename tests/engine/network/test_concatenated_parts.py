"""Parts of a concatenation that is kept are not handed to the backward pass beside it, with equal gradients."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onward.engine.network.concatenated_parts import ConcatenatedParts
from onward.engine.network.kept_operands import KeptOperands
from onward.engine.network.recomputed_masks import RecomputedMasks
from tests.engine.network.partitions import run_cut

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of two parts (6, 8), results of products, and a weight (16, 3)."""


@dataclass(frozen=True)
class Example:
    """A function, and how many of its values in rows of 6 it hands over without and with the pass: each part has 8."""

    function: Layer
    before: int
    after: int


def _activated(y: Tensor, z: Tensor, w: Tensor) -> Tensor:
    return torch.cat((F.relu(y), z.tanh()), 1) @ w


def _along_rows(y: Tensor, z: Tensor, w: Tensor) -> Tensor:
    return torch.cat((F.relu(y), F.relu(z)), -2).reshape(6, 16) @ w


def _in_two(y: Tensor, z: Tensor, w: Tensor) -> Tensor:
    y, z = F.relu(y), F.relu(z)
    return torch.cat((y, z), 1) @ w + torch.cat((z, y), 1) @ w.cos()


def _with_a_product(y: Tensor, z: Tensor, w: Tensor) -> Tensor:
    y = F.relu(y)
    return torch.cat((y, F.relu(z)), 1) @ w + y @ w[:8]


def _of_inputs(y: Tensor, z: Tensor, w: Tensor) -> Tensor:
    return torch.cat((F.silu(y), F.silu(z)), 1) @ w


EXAMPLES = {
    "ReLU and tanh": Example(_activated, 16 + 16, 16),
    "rows": Example(_along_rows, 16 + 16, 16),
    "two concatenations": Example(_in_two, 16 + 16 + 16, 16 + 16),
    "a part that a product reads": Example(_with_a_product, 8 + 8 + 16, 8 + 16),
    "activations that read their inputs": Example(_of_inputs, 16 + 16, 16 + 16),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_parts_are_not_handed_over_beside_the_whole(name: str) -> None:
    example = EXAMPLES[name]
    x, u, v, w = (torch.randn(shape, requires_grad=True) for shape in ((6, 5), (5, 8), (5, 8), (16, 3)))

    def function(x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return example.function(x @ u, x @ v, w)

    kept = RecomputedMasks(), KeptOperands()
    with torch._functorch.config.patch(ban_recompute_materialized_backward=False):
        found, before = (run_cut(function, [x, u, v, w], *passes) for passes in ((ConcatenatedParts(), *kept), kept))
    for cut, expected in ((before, example.before), (found, example.after)):
        values = [one for one in cut.handed if one.shape[0] in (6, 12) or one.shape[-1:] == (6,)]
        assert sum(one.numel() for one in values) == 6 * expected + x.numel(), [tuple(one.shape) for one in cut.handed]
    assert torch.equal(found.result, before.result)
    assert all(torch.equal(*pair) for pair in zip(found.gradients, before.gradients, strict=True))


ACTIVATIONS = (torch.relu, torch.tanh, torch.sigmoid, F.silu, F.leaky_relu)


def _draw(seed: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Activations, sums, products and concatenations of rows and of columns, in an order that the seed draws."""

    def compute(x: Tensor, u: Tensor, w: Tensor) -> Tensor:
        source = random.Random(seed)
        values = [x @ u, x @ u.cos()]
        for _ in range(9):
            left, right = source.choice(values), source.choice(values)
            kind = source.choice(("activation", "activation", "sum", "product", "columns", "columns", "rows"))
            if kind == "activation":
                values.append(source.choice(ACTIVATIONS)(left))
            elif kind == "columns":
                values.append(torch.cat((left, right), source.choice((1, -1))) @ w)
            elif kind == "rows":
                values.append(torch.cat((left, right)).reshape(6, 16) @ w)
            else:
                values.append(left + right if kind == "sum" else left * right)
        return torch.stack(values).sum(0) + torch.cat(values[-2:], 1) @ w

    return compute


@pytest.mark.parametrize("seed", range(30))
def test_drawn_networks_have_the_same_gradients_and_hand_over_no_more(seed: int) -> None:
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((6, 5), (5, 8), (16, 8))]
    kept = RecomputedMasks(), KeptOperands()
    with torch._functorch.config.patch(ban_recompute_materialized_backward=False):
        found, before = (run_cut(_draw(seed), inputs, *passes) for passes in ((ConcatenatedParts(), *kept), kept))
    assert sum(one.numel() for one in found.handed) <= sum(one.numel() for one in before.handed)
    assert torch.equal(found.result, before.result)
    assert all(torch.equal(*pair) for pair in zip(found.gradients, before.gradients, strict=True))
