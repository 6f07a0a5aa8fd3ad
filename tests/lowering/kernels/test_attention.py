"""Attention with a mask that has a gradient, and without one, against the formula in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional

from onward.lowering.kernels.attention import attend

MASKS = [(2, 3, 5, 7), (1, 3, 5, 7), (3, 5, 7), (2, 1, 1, 7), (5, 1), (7,)]


def written_out(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(query @ key.mT * 0.3 + mask, -1) @ value


def drawn(mask: tuple[int, ...]) -> list[Tensor]:
    """Queries, keys and values as heads that layers share memory for, and a mask."""
    torch.manual_seed(0)
    heads = [torch.randn(2, length, 3, size).transpose(1, 2) for length, size in ((5, 4), (7, 4), (7, 6))]
    return [*heads, torch.randn(mask)]


@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_of_a_learned_mask(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and all four gradients; torch's kernel is not asked."""
    monkeypatch.setattr(functional, "scaled_dot_product_attention", None)
    own = [tensor.requires_grad_() for tensor in drawn(shape)]
    exact = [tensor.double().requires_grad_() for tensor in drawn(shape)]
    result, expected = attend(*own, scale=0.3), written_out(*exact)
    weight = torch.randn_like(result)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)
    for mine, other in zip(
        torch.autograd.grad(result, own, weight), torch.autograd.grad(expected, exact, weight.double()), strict=True
    ):
        torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=1e-6)


def test_a_frozen_query_has_no_gradient() -> None:
    query, key, value, mask = drawn((5, 7))
    attend(query, key, value, mask.requires_grad_(), scale=0.3).sum().backward()
    assert query.grad is None
    assert mask.grad is not None


def test_of_another_mask_or_type_it_is_torchs_kernel() -> None:
    """Without gradients for the mask, under no_grad, of grouped heads and of 16 bits: the same bits."""
    query, key, value, mask = drawn((5, 7))
    one, few = query[:, :1], key[:, :1]
    cases = [
        (query, key, value, mask), (one, few, value[:, :1], mask.requires_grad_()),
        (query.bfloat16(), key.bfloat16(), value.bfloat16(), mask.bfloat16()),
    ]  # fmt: skip
    for case in cases:
        with torch.no_grad():
            expected = functional.scaled_dot_product_attention(*case, scale=0.3)
            assert torch.equal(attend(*case, scale=0.3), expected)
    grouped = attend(query, few, value[:, :1], mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(grouped, written_out(query, few, value[:, :1], mask), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("batch", "keys"), [(0, 7), (2, 1)])
def test_of_no_samples_and_of_one_key(batch: int, keys: int) -> None:
    query, key, value, mask = drawn((5, 7))
    own = [
        tensor.requires_grad_()
        for tensor in (query[:batch], key[:batch, :, :keys], value[:batch, :, :keys], mask[:, :keys])
    ]
    result, expected = attend(*own, scale=0.3), written_out(*own)
    torch.testing.assert_close(result, expected)
    mine, other = (torch.autograd.grad(found.sum(), own) for found in (result, expected))
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_under_autocast_it_is_torchs_kernel() -> None:
    """Which takes all products in 16 bits; the gradients come back in the types of the inputs."""
    own = [tensor.requires_grad_() for tensor in drawn((5, 7))]
    with torch.autocast("cpu", torch.bfloat16):
        result = attend(*own, scale=0.3)
        expected = functional.scaled_dot_product_attention(*own, scale=0.3)
    assert result.dtype is torch.bfloat16
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    mine, other = (torch.autograd.grad(found.float().sum(), own) for found in (result, expected))
    torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_transforms_of_torch_func_reach_a_learned_mask() -> None:
    """The gradient of each sample by vmap, against one after the other."""
    query, key, value, mask = drawn((5, 7))

    def loss(bias: Tensor, *heads: Tensor) -> Tensor:
        return attend(*(head.unsqueeze(0) for head in heads), bias, scale=0.3).sin().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0, 0, 0))(mask, query, key, value)
    for sample in range(2):
        bias = mask.clone().requires_grad_()
        written_out(query[sample], key[sample], value[sample], bias).sin().sum().backward()
        torch.testing.assert_close(found[sample], bias.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("frozen", [None, 0, 2])
def test_second_derivatives(frozen: int | None) -> None:
    """Against finite differences of the first, also where one of the inputs has no gradient."""
    own = [tensor.double().requires_grad_(place != frozen) for place, tensor in enumerate(drawn((1, 3, 5, 7)))]
    assert torch.autograd.gradgradcheck(lambda *given: attend(*given, scale=0.3), tuple(own))


LACKING: dict[str, tuple[dict[str, Any], Callable[[list[Tensor]], list[Tensor]]]] = {
    "a learned mask": ({}, lambda given: given),
    "values of another width": ({"mask": None}, lambda given: given),
    "elements that are not adjacent": (
        {"mask": None},
        lambda given: [*given[:2], given[1].mT.contiguous().mT, given[3]],
    ),
    "a causal mask": ({"mask": None, "is_causal": True}, lambda given: given),
    "a mask of booleans": ({"mask": torch.ones(5, 7, dtype=torch.bool).tril(2)}, lambda given: given),
}


def compiled(**options: Any) -> tuple[Callable[..., Tensor], set[Any]]:
    """`attend` as torch traces it when it compiles, and the functions that it calls then."""
    called = set[Any]()

    def keep(module: fx.GraphModule, _: list[Tensor]) -> fx.GraphModule:
        called.update(node.target for node in module.graph.nodes)
        return module

    torch.compiler.reset()
    return torch.compile(functools.partial(attend, scale=0.3, **options), backend=keep, fullgraph=True), called


@pytest.mark.parametrize("reason", LACKING)
def test_compiled_code_decomposes_what_torchs_kernel_does_not_take(reason: str) -> None:
    """Outputs and gradients; torch's own decomposition, which looks for rows without keys, is not asked."""
    options, change = LACKING[reason]
    own = [tensor.requires_grad_() for tensor in change(drawn((5, 7)))]
    exact = [tensor.detach().double().requires_grad_() for tensor in own]
    mask, is_causal = options.get("mask", own[3]), options.get("is_causal", False)
    run, called = compiled(is_causal=is_causal)
    result = run(*own[:3], mask)
    assert functional.scaled_dot_product_attention not in called
    hidden = torch.zeros(5, 7, dtype=torch.bool)
    if is_causal:
        hidden = torch.ones(5, 7, dtype=torch.bool).triu(1)
    elif mask is not None and mask.dtype == torch.bool:
        hidden = ~mask
    added = exact[3] if mask is own[3] else torch.zeros(5, 7).double().masked_fill(hidden, -torch.inf)
    expected = written_out(*exact[:3], added)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)
    count, weight = 3 + (mask is own[3]), torch.randn_like(result)
    mine = torch.autograd.grad(result, own[:count], weight)
    for one, other in zip(mine, torch.autograd.grad(expected, exact[:count], weight.double()), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


def test_compiled_code_drops_probabilities_out() -> None:
    """A share of them, the others scaled up, whose mean is what there is without."""
    query, key, value, _ = drawn((5, 7))
    expected = attend(query, key, value, None, scale=0.3)
    run, called = compiled(dropout=0.25)
    several = [tensor.repeat(4000, 1, 1, 1) for tensor in (query, key, value)]
    found = run(*several, None).unflatten(0, (4000, 2))
    assert functional.scaled_dot_product_attention not in called
    assert found.std(0).min() > 0.01
    torch.testing.assert_close(found.mean(0), expected, rtol=0, atol=0.05)


def test_compiled_code_asks_torchs_kernel_where_there_is_one() -> None:
    query, key, _, mask = drawn((5, 7))
    run, called = compiled()
    assert torch.equal(run(query, key, key, mask), attend(query, key, key, mask, scale=0.3))
    assert functional.scaled_dot_product_attention in called
