"""Batch normalization in training: results, running statistics and gradients are torch's."""

from __future__ import annotations

import pytest
import torch

from onward.artifacts.normalization_decompositions import normalization_decompositions

aten = torch.ops.aten


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (4, 3, 5, 2)])
@pytest.mark.parametrize("is_affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # torch's own decompositions for the second
def test_batch_norm_and_its_gradients_are_torchs(shape: tuple[int, ...], is_affine: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) * 3 + 2).to(dtype).requires_grad_()
    weight = torch.tensor([0.5, -1.0, 2.0], dtype=dtype, requires_grad=True) if is_affine else None
    bias = torch.tensor([1.0, 0.0, -3.0], dtype=dtype, requires_grad=True) if is_affine else None
    before = (torch.tensor([1.0, 2.0, 3.0], dtype=dtype), torch.tensor([3.0, 2.0, 1.0], dtype=dtype))
    table = normalization_decompositions()
    expected = aten._native_batch_norm_legit_functional(x, weight, bias, *before, True, 0.3, 1e-5)
    forward = table[aten._native_batch_norm_legit_functional.default]
    found = forward(x.detach(), weight, bias, *before, True, 0.3, 1e-5)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=2e-6)
    gradient = torch.randn(shape, generator=generator).to(dtype)
    known = [one for one in (x, weight, bias) if one is not None]
    wanted = torch.autograd.grad(expected[0], known, gradient)
    backward = table[aten.native_batch_norm_backward.default]
    saved = (expected[1].detach(), expected[2].detach())
    gradients = backward(gradient, x.detach(), weight, *before, *saved, True, 1e-5, [True, True, True])
    for mine, theirs in zip(gradients, wanted, strict=False):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_one_value_per_channel_has_a_variance_of_zero(dtype: torch.dtype) -> None:
    """ONNX's running statistics are of the population; torch's kernel gives 0 / 0, and the value itself is its mean."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    x, before = torch.tensor([[1.5, -2.0]], dtype=dtype), (torch.zeros(2, dtype=wide), torch.ones(2, dtype=wide))
    forward = normalization_decompositions()[aten._native_batch_norm_legit_functional.default]
    scale, shift = torch.ones(2, dtype=wide), torch.tensor([3.0, -1.0], dtype=wide)
    output, mean, inverse, *news = forward(x, scale, shift, *before, True, 0.25, 1e-5)
    assert output.dtype is dtype
    assert output.tolist() == [[3.0, -1.0]]
    assert mean.tolist() == [1.5, -2.0]
    assert inverse.tolist() == pytest.approx([1e-5**-0.5] * 2, rel=1e-6)
    assert [new.tolist() for new in news] == [[0.375, -0.5], [0.75, 0.75]]


def test_statistics_that_are_given_stay_torchs_own_way() -> None:
    x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
    given = (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 2.0, 1.0]))
    arguments = (x, None, None, *given, False, 0.3, 1e-5)
    found = normalization_decompositions()[aten._native_batch_norm_legit_functional.default](*arguments)
    assert torch.allclose(found[0], aten._native_batch_norm_legit_functional(*arguments)[0], atol=1e-6)


@pytest.mark.parametrize("is_affine", [True, False])
def test_layer_norm_of_half_floats_gives_statistics_in_float32(is_affine: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, *affine = (torch.randn(size, generator=generator).half() for size in ((4, 8), (8,), (8,)))
    weight, bias = affine if is_affine else (None, None)
    layer_norm = normalization_decompositions()[aten.native_layer_norm.default]
    output, mean, inverse = layer_norm(x, [8], weight, bias, 1e-5)
    assert (output.dtype, mean.dtype, inverse.dtype) == (torch.float16, torch.float32, torch.float32)
    scale, shift = (None if one is None else one.double() for one in (weight, bias))
    wanted = torch.nn.functional.layer_norm(x.double(), [8], scale, shift)
    assert (output.double() - wanted).abs().max() < 2e-3
    assert torch.allclose(mean[:, 0], x.float().mean(1), atol=1e-6)
    assert layer_norm(x.float(), [8], None, None, 1e-5) is NotImplemented
