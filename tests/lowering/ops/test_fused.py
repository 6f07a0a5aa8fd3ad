"""Fused norms, SwiGLU and rotary embedding: gradients against finite differences, types under autocast."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from onward.lowering.ops.fused import layer_normalization, rms_normalization, rotary_embedding, swiglu

GENERATOR = torch.Generator().manual_seed(0)


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64).requires_grad_()


def test_swiglu() -> None:
    a, b = leaf(3, 4), leaf(3, 4)
    torch.testing.assert_close(swiglu(a, b), F.silu(a) * b)
    assert torch.autograd.gradcheck(swiglu, (a, b))
    assert torch.autograd.gradcheck(lambda x, y: swiglu(x, y, alpha=1.5), (a, b))


def test_swiglu_keeps_two_tensors() -> None:
    """The gate's SiLU is not kept for the backward pass."""
    a, b = leaf(3, 4), leaf(3, 4)
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        swiglu(a, b)
    assert {tensor.data_ptr() for tensor in kept} == {a.data_ptr(), b.data_ptr()}


@pytest.mark.parametrize("interleaved", [0, 1])
def test_rotary_embedding(interleaved: int) -> None:
    x, cosine, sine = leaf(2, 3, 4), leaf(3, 4), leaf(3, 4)
    pairs = x.unflatten(-1, (2, 2)).flip(-1) * torch.tensor([-1.0, 1.0])
    first, second = x.chunk(2, -1)
    turned = pairs.flatten(-2) if interleaved else torch.cat([-second, first], -1)
    torch.testing.assert_close(rotary_embedding(x, cosine, sine, interleaved=interleaved), x * cosine + turned * sine)
    assert torch.autograd.gradcheck(lambda *t: rotary_embedding(*t, interleaved=interleaved), (x, cosine, sine))


def test_norms_without_parameters() -> None:
    x = leaf(2, 3, 4)
    torch.testing.assert_close(layer_normalization(x, axis=-2), F.layer_norm(x, (3, 4), eps=1e-5))
    torch.testing.assert_close(rms_normalization(x), x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt())


@pytest.mark.parametrize("norm", [layer_normalization, rms_normalization])
def test_norms_are_float32_under_autocast(norm: object) -> None:
    """As torch's own functions are, whatever 16-bit type their input and parameters have."""
    assert callable(norm)
    x = leaf(2, 300).detach()
    scale = leaf(300).detach()
    low = x.bfloat16(), scale.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = norm(*low)
    assert result.dtype == torch.float32
    exact = norm(low[0].double(), low[1].double())
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-5)
