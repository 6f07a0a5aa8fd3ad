"""Maxima of windows whose places take a byte: values and gradients are those of torch's own pooling, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import onward.lowering.kernels.max_pooling as max_pooling
from onward.lowering.kernels.max_pooling import pool_max

# (rows, columns), kernel, stride, padding, dilation, whether a last window may reach over the edge, type of places
CASES = {
    "3x3": ((13, 11), (3, 3), (2, 2), (0, 0), (1, 1), False, torch.uint8),
    "padded": ((12, 9), (3, 3), (2, 2), (1, 1), (1, 1), False, torch.uint8),
    "reaching over": ((12, 10), (3, 3), (2, 2), (0, 0), (1, 1), True, torch.uint8),
    "unlike sides": ((9, 14), (2, 5), (1, 3), (1, 2), (1, 1), False, torch.uint8),
    "dilated": ((15, 15), (3, 2), (1, 2), (1, 0), (2, 3), False, torch.uint8),
    "narrower than its window": ((8, 2), (3, 3), (1, 1), (1, 1), (1, 1), False, torch.uint8),
    "wide image": ((5, 200), (3, 3), (2, 2), (1, 1), (1, 1), False, torch.int16),
}


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(max_pooling, "LEAST_BYTES", 0)


@pytest.mark.parametrize("least", [1, 2**20], ids=["one image at a time", "all at once"])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=["last", "first"])
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_torchs_own(
    case: str, layout: torch.memory_format, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(max_pooling, "PLACES_BYTES", least)
    size, *along, ceiling, places = CASES[case]
    x = torch.randint(0, 9, (2, 3, *size)).float()  # many equal ones
    x[0, 0, 0, 0] = torch.nan
    x = x.contiguous(memory_format=layout).requires_grad_()
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        found = pool_max(x, along, ceiling)
    expected = F.max_pool2d(x, *along, ceiling)
    assert [(t.shape, t.dtype) for t in saved] == [(found.shape, places)]
    shares = torch.randn(expected.shape)  # a gradient with the channels first, whatever the layout of x is
    pairs = [(found, expected)]
    pairs += [tuple(torch.autograd.grad((y * shares).sum(), x)[0] for y in (found, expected))]
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert one.stride() == other.stride()


def test_gradients_and_their_gradients_are_those_of_finite_differences() -> None:
    x = torch.randperm(2 * 2 * 7 * 7).reshape(2, 2, 7, 7).double().requires_grad_()

    def pooled(x: Tensor) -> Tensor:
        return pool_max(x, ((3, 3), (2, 2), (1, 1), (1, 1)), False)

    assert torch.autograd.gradcheck(pooled, (x,))
    assert torch.autograd.gradgradcheck(pooled, (x,))


def test_few_places_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x = torch.randn(1, 1, 4, 4).requires_grad_()
    pooled = pool_max(x, ((2, 2), (2, 2), (0, 0), (1, 1)), False)
    assert type(pooled.grad_fn).__name__ == "MaxPool2DWithIndicesBackward0"


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=["last", "first"])
def test_traced_for_the_compiler_the_bits_are_torchs_own(layout: torch.memory_format) -> None:
    """With the kernel of torch in place of the compiler's, which overlapping windows make four times as slow."""
    targets = []

    def backend(module: torch.fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
        targets.extend(str(node.target) for node in module.graph.nodes)
        return module.forward

    along = ((3, 3), (2, 2), (1, 1), (1, 1))
    pooled = torch.compile(lambda x: pool_max(x, along, False), backend=backend, dynamic=False)
    x = torch.randint(0, 9, (2, 3, 12, 9)).float().contiguous(memory_format=layout).requires_grad_()
    found, expected = pooled(x), F.max_pool2d(x, *along)
    shares = torch.randn(expected.shape)
    (of_found,), (of_expected,) = (torch.autograd.grad((y * shares).sum(), x) for y in (found, expected))
    assert torch.equal(found, expected)
    assert torch.equal(of_found, of_expected)
    assert any("onward.max_pool" in target for target in targets)
    torch.library.opcheck(torch.ops.onward.max_pool.default, (x, *map(list, along), False))
