"""Batches of one image, in every way that its strides can be told: gradients are those of the formula."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

import onward
from onward.lowering.kernels.single_images import canonicalize_strides
from tests.graph.fusion.pairs import parse

C, S = 3, 4
WAYS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x.contiguous(),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "channels last of one image": lambda x: x.contiguous(memory_format=torch.channels_last)[0].unsqueeze(0),
    "any stride": lambda x: x.contiguous().as_strided(x.shape, (1, S * S, S, 1)),
    "turned": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "spread": lambda x: x[:, :, :1, :1].expand(x.shape),
}


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("of_gradient", WAYS)
@pytest.mark.parametrize("of_image", WAYS)
def test_gradients_are_those_of_the_formula(of_image: str, of_gradient: str, training: bool) -> None:
    """Written out in float64; a few roundings of float32."""
    stored = {"s": 1.5 + drawn(1, C), "b": drawn(2, C), "m": 0.3 * torch.ones(C), "v": 2 * torch.ones(C)}
    model = parse(
        f"float[1,{C},{S},{S}] x", f"float[1,{C},{S},{S}] y", "y = BatchNormalization(x, s, b, m, v)",
        {name: tensor.numpy() for name, tensor in stored.items()},
    )  # fmt: skip
    net = onward.to_torch(model).train(training)
    x = WAYS[of_image](drawn(3, 1, C, S, S)).detach().requires_grad_()
    given = WAYS[of_gradient](drawn(4, 1, C, S, S))
    y = net(x)
    found = torch.autograd.grad(y, [x, net.weights["s"], net.weights["b"]], given)

    wide = [tensor.detach().double().requires_grad_() for tensor in (x, stored["s"], stored["b"])]
    mean, variance = stored["m"].double(), stored["v"].double()
    if training:
        variance, mean = torch.var_mean(wide[0], (0, 2, 3), correction=0)
    factor = (variance + 1e-5).rsqrt() * wide[1]
    exact = (wide[0] - mean[:, None, None]) * factor[:, None, None] + wide[2][:, None, None]
    for one, other in zip((y, *found), (exact, *torch.autograd.grad(exact, wide, given.double())), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_two_norms_in_a_row_of_an_image_in_channels_last() -> None:
    """What first showed it: the gradient of a shift is a sum, and was another one."""
    norms = "n = BatchNormalization(h, s, b, m, v)\nw = BatchNormalization(n, s, o, m, v)"
    body = f"h = Conv(x, k)\n{norms}\nz = GlobalAveragePool(w)"
    stored = {"k": drawn(1, C, C, 1, 1), "s": drawn(2, C), "b": drawn(3, C), "o": drawn(4, C)}
    arrays = {name: tensor.numpy() for name, tensor in stored.items()}
    arrays |= {"m": np.zeros(C, np.float32), "v": np.ones(C, np.float32)}
    net = onward.to_torch(parse(f"float[1,{C},{S},{S}] x", f"float[1,{C},1,1] z", body, arrays)).train()
    net(drawn(5, 1, C, S, S)).backward(drawn(6, 1, C, 1, 1))
    torch.testing.assert_close(net.weights["o"].grad, drawn(6, C), rtol=1e-6, atol=1e-6)


def test_what_is_told_plainly_is_not_copied() -> None:
    x = drawn(0, 1, C, S, S)
    several = drawn(0, 2, C, S, S).contiguous(memory_format=torch.channels_last)
    for tensor in (x, WAYS["channels last"](x), WAYS["spread"](x), several, x[0]):
        assert canonicalize_strides(tensor) is tensor
    for way in ("channels last of one image", "any stride"):
        plain = canonicalize_strides(WAYS[way](x))
        assert torch.equal(plain, x)
        assert plain.stride(0) == x.numel()
