"""Fused norms, SwiGLU and rotary embedding: gradients against finite differences, types under autocast."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from onward.lowering.ops.fused import layer_normalization, rms_norm, rms_normalization, rotary_embedding, swiglu

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


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("tables", [(3, 4), (1, 3, 4), (2, 1, 3, 1)])
def test_rotary_embedding_by_fixed_tables(tables: tuple[int, ...], interleaved: int) -> None:
    """As with tables that have a gradient, to the last digits, however x lies; only the tables are kept."""
    x = leaf(2, 3, 5, 4).transpose(1, 2)[:, :, :3]
    cosine, sine = leaf(*tables), leaf(*tables)
    expected = rotary_embedding(x, cosine, sine, interleaved=interleaved)
    kept: list[int] = []
    fixed = cosine.detach(), sine.detach()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):  # type: ignore[func-returns-value]
        found = rotary_embedding(x, *fixed, interleaved=interleaved)
    assert sorted(kept) == sorted(table.data_ptr() for table in fixed)
    shares = torch.randn(expected.shape, dtype=torch.float64)
    pairs = [
        (found, expected),
        *zip(*(torch.autograd.grad((y * shares).sum(), x) for y in (found, expected)), strict=True),
    ]
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradcheck(lambda t: rotary_embedding(t, *fixed, interleaved=interleaved), x)


def test_rotary_embedding_of_one_row_for_many_tables() -> None:
    """What is larger than x cannot be written over it."""
    x, cosine, sine = leaf(1, 4), leaf(3, 4).detach(), leaf(3, 4).detach()
    assert rotary_embedding(x, cosine, sine).shape == (3, 4)
    assert torch.autograd.gradcheck(lambda t: rotary_embedding(t, cosine, sine), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_rounds_no_more_than_torch(dtype: torch.dtype) -> None:
    """Errors of values and gradients against float64, in norms over all of 600 rows."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(shape, generator=generator) for shape in ((600, 256), (256,), (600, 256))]
    results = []
    for kind, norm in ((torch.float64, F.rms_norm), (dtype, F.rms_norm), (dtype, rms_norm)):
        x, scale, shares = (tensor.to(dtype).to(kind, copy=True).requires_grad_() for tensor in drawn)
        y = norm(x, (256,), scale, 1e-5)
        y.backward(shares)
        results.append([y.detach().double(), x.grad.double(), scale.grad.double()])  # type: ignore[union-attr]
    for exact, theirs, ours in zip(*results, strict=True):
        assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()


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
