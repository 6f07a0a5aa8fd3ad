"""Gradients of convolutions that are convolutions themselves: against finite differences and torch's own."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onward.engine.network.compilation import options_for
from onward.lowering.kernels import convolution_gradients
from onward.lowering.kernels.convolution_gradients import Along, convolution

SWAPPED: dict[str, tuple[Sequence[int], Sequence[int], Along]] = {
    "square": ((2, 3, 8, 8), (3, 1, 5, 5), ((1, 1), (2, 2), (1, 1), 3)),
    "without padding": ((2, 2, 9, 8), (2, 1, 7, 4), ((1, 1), (0, 0), (1, 1), 2)),
    "steps, and a rest beyond the last": ((2, 2, 10, 11), (2, 1, 5, 4), ((2, 3), (2, 1), (1, 1), 2)),
    "dilated": ((2, 2, 12, 9), (2, 1, 4, 3), ((1, 2), (3, 0), (2, 3), 2)),
    "a line": ((2, 3, 11), (3, 1, 4), ((1,), (3,), (1,), 3)),
    "wide padding": ((2, 2, 5, 4), (2, 1, 3, 9), ((1, 1), (1, 8), (1, 1), 2)),
    "a line, in steps": ((2, 3, 14), (3, 1, 9), ((2,), (4,), (1,), 3)),
    "a volume": ((2, 2, 4, 5, 3), (2, 1, 3, 2, 3), ((1, 1, 1), (1, 0, 2), (1, 1, 1), 2)),
}
TURNED: dict[str, tuple[Sequence[int], Sequence[int], Along]] = {
    "padded": ((2, 3, 6, 5), (4, 3, 3, 3), ((1, 1), (1, 1), (1, 1), 1)),
    "unequal": ((2, 2, 6, 5), (3, 2, 2, 3), ((1, 1), (0, 2), (1, 1), 1)),
    "channels apart, dilated": ((2, 3, 8, 7), (3, 1, 3, 2), ((1, 1), (2, 1), (2, 3), 3)),
}


def drawn(image: Sequence[int], weight: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in (image, weight, weight[:1])]


@pytest.mark.parametrize("name", [*SWAPPED, *TURNED])
def test_gradients_and_their_gradients_are_right(name: str) -> None:
    image, weight, along = (SWAPPED | TURNED)[name]
    is_turned = name in TURNED
    given = drawn(image, weight, torch.float64)

    def compute(*tensors: Tensor) -> Tensor:
        is_both = len(image) == 5
        ways = is_turned or is_both, not is_turned
        result: Tensor = convolution_gradients._Convolution.apply(*tensors, along, *ways, False)
        return result

    assert torch.autograd.gradcheck(compute, given)
    assert torch.autograd.gradgradcheck(compute, given)


def gradients(given: Sequence[Tensor], along: Along, compute: Any) -> list[Tensor]:
    result = compute(*given, *along)
    torch.manual_seed(1)
    direction = torch.randn(result.shape).to(result.dtype)
    leaves = [tensor for tensor in given if tensor.requires_grad]
    return [result.detach(), *torch.autograd.grad(result, leaves, direction)]


@pytest.mark.parametrize("trained", [(0, 1, 2), (1,), (0, 2), (2,)])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", [*SWAPPED, *TURNED])
def test_whatever_is_trained_in_whatever_layout(name: str, last: bool, trained: Sequence[int]) -> None:
    """To what float32 rounds: a sum of up to 200 terms, added in another order."""
    image, weight, along = (SWAPPED | TURNED)[name]
    given = drawn(image, weight, torch.float32)
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    if last and len(image) in layouts:
        given[0] = given[0].detach().contiguous(memory_format=layouts[len(image)])
    for place, tensor in enumerate(given):
        tensor.requires_grad_(place in trained)
    wide = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in given]
    own = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(image) - 2]
    found = gradients(given, along, lambda *rest: convolution(*rest, stays=not last))
    for one, expected in zip(found, gradients(wide, along, own), strict=True):
        torch.testing.assert_close(one.double(), expected, rtol=1e-5, atol=2e-5)


def test_only_what_gains_takes_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[bool, bool]] = []
    own = convolution_gradients._Convolution.apply

    def noted(*arguments: Any) -> Tensor:
        taken.append(arguments[-3:-1])
        result: Tensor = own(*arguments)
        return result

    monkeypatch.setattr(convolution_gradients._Convolution, "apply", noted)
    image, weight, along = SWAPPED["square"]
    given = drawn(image, weight, torch.float32)
    convolution(*given, *along)
    assert taken == [(False, True)]
    few_image, few_weight, few_along = TURNED["padded"]
    convolution(*drawn(few_image, few_weight, torch.float32), *few_along, stays=True)
    assert taken == [(False, True), (True, False)]
    small, large = ((3, 1, 3, 3), ((1, 1), (1, 1), (1, 1), 3)), (2, 3, 40, 40)
    convolution(*drawn(image, small[0], torch.float32), *small[1])
    convolution(*drawn(large, weight, torch.float32), *along)
    convolution(*drawn(few_image, few_weight, torch.float32), *few_along)
    convolution(*drawn(image, weight, torch.float64), *along)
    with torch.no_grad():
        convolution(*given, *along)
    with torch.autocast("cpu", torch.bfloat16):
        convolution(*given, *along)
    assert len(taken) == 2


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for CPUs with g++")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch's compiler
@pytest.mark.parametrize("name", ["square", "a line, in steps"])
def test_compiled_code_computes_the_same(name: str) -> None:
    image, weight, along = SWAPPED[name]
    given = drawn(image, weight, torch.float32)
    compiled = torch.compile(convolution, dynamic=False, options=options_for(torch.device("cpu")))
    for one, expected in zip(gradients(given, along, compiled), gradients(given, along, convolution), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", [*SWAPPED, *TURNED])
def test_torchs_compiler_is_told_what_its_operators_give(name: str) -> None:
    image, weight, along = (SWAPPED | TURNED)[name]
    X, W, B = (tensor.detach() for tensor in drawn(image, weight, torch.float32))
    lists = [list(one) for one in along[:3]]
    gradient = torch.ones_like(torch.ops.onward.convolution(X, W, B, *lists, along[3]))
    torch.library.opcheck(torch.ops.onward.convolution.default, (X, W, B, *lists, along[3]))
    ways = ("image", name in TURNED), ("image", False), ("weight", name in SWAPPED), ("weight", False)
    for what, is_own in ways:
        operator = getattr(torch.ops.onward, f"convolution_{what}_gradient").default
        torch.library.opcheck(operator, (gradient, X, W, *lists, along[3], is_own))
