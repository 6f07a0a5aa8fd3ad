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
    "volume": ((6, 5, 7), (2, 3, 2), (1, 2, 2), (1, 1, 0), (1, 1, 2), False, torch.uint8),
    "large volume": ((4, 9, 30), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), True, torch.int16),
}
_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
_POOL = {2: F.max_pool2d, 3: F.max_pool3d}


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(max_pooling, "LEAST_BYTES", 0)


@pytest.mark.parametrize("least", [1, 2**20], ids=["one image at a time", "all at once"])
@pytest.mark.parametrize("is_last", [True, False], ids=["last", "first"])
@pytest.mark.parametrize("channels", [3, 9])
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_torchs_own(
    case: str, channels: int, is_last: bool, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(max_pooling, "PLACES_BYTES", least)
    size, *along, ceiling, places = CASES[case]
    x = torch.randint(0, 9, (2, channels, *size)).float()  # many equal ones
    x[0, 0, 0, 0] = torch.nan
    x = (x.contiguous(memory_format=_LAST[len(size)]) if is_last else x).requires_grad_()
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        found = pool_max(x, along, ceiling)
    expected = _POOL[len(size)](x, *along, ceiling)
    assert [(t.shape, t.dtype) for t in saved] == [(found.shape, places)]
    shares = torch.randn(expected.shape)  # a gradient with the channels first, whatever the layout of x is
    pairs = [(found, expected)]
    pairs += [tuple(torch.autograd.grad((y * shares).sum(), x)[0] for y in (found, expected))]
    with torch.no_grad():
        pairs += [(pool_max(x, along, ceiling), expected)]
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert one.stride() == other.stride()


@pytest.mark.parametrize("shape", [(2, 2, 7), (2, 2, 7, 7), (1, 9, 4, 4), (1, 2, 4, 4, 4)])
def test_gradients_and_their_gradients_are_those_of_finite_differences(shape: tuple[int, ...]) -> None:
    x = torch.randperm(torch.Size(shape).numel()).reshape(shape).double().requires_grad_()

    def pooled(x: Tensor) -> Tensor:
        return pool_max(x, [(size,) * (x.dim() - 2) for size in (3, 2, 1, 1)], False)

    assert torch.autograd.gradcheck(pooled, (x,))
    assert torch.autograd.gradgradcheck(pooled, (x,))


def test_few_places_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x = torch.randn(1, 1, 4, 4).requires_grad_()
    pooled = pool_max(x, ((2, 2), (2, 2), (0, 0), (1, 1)), False)
    assert type(pooled.grad_fn).__name__ == "MaxPool2DWithIndicesBackward0"


@pytest.mark.parametrize("size", [(12, 9), (5, 6, 7)], ids=["image", "volume"])
@pytest.mark.parametrize("channels", [3, 9])
@pytest.mark.parametrize("is_last", [True, False], ids=["last", "first"])
def test_traced_for_the_compiler_the_bits_are_torchs_own(size: tuple[int, ...], channels: int, is_last: bool) -> None:
    """With the kernel of torch in place of the compiler's, which overlapping windows make four times as slow."""
    targets = []

    def backend(module: torch.fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
        targets.extend(str(node.target) for node in module.graph.nodes)
        return module.forward

    along = [(one,) * len(size) for one in (3, 2, 1, 1)]
    pooled = torch.compile(lambda x: pool_max(x, along, False), backend=backend, dynamic=False)
    x = torch.randint(0, 9, (2, channels, *size)).float()
    x = (x.contiguous(memory_format=_LAST[len(size)]) if is_last else x).requires_grad_()
    found, expected = pooled(x), _POOL[len(size)](x, *along)
    shares = torch.randn(expected.shape)
    (of_found,), (of_expected,) = (torch.autograd.grad((y * shares).sum(), x) for y in (found, expected))
    assert torch.equal(found, expected)
    assert torch.equal(of_found, of_expected)
    assert any("onward.max_pool" in target for target in targets)
    torch.library.opcheck(torch.ops.onward.max_pool.default, (x, *map(list, along), False))
