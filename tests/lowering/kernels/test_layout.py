"""Images convolved with channels last: the same numbers, gradients and shapes as torch's own, in that layout."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

import onward.lowering.kernels.layout as layout
from onward.engine.network.compilation import options_for
from onward.lowering.kernels.layout import convolve_images
from onward.lowering.ops.activation import elu, gelu, hard_swish, leaky_relu, relu, swish

LAST = torch.channels_last
# (channels, rows and columns), (weight), stride, padding, dilation, groups; the fourth weight is larger than its image.
CASES = {
    "3x3": ((5, 9), (8, 5, 3, 3), 1, 1, 1, 1),
    "3x3, stride and dilation": ((6, 19), (4, 6, 3, 3), 2, 2, 2, 1),
    "groups": ((6, 9), (12, 3, 3, 3), 1, 1, 1, 2),
    "depthwise": ((6, 9), (6, 1, 3, 3), 1, 1, 1, 6),
    "larger weight than image": ((8, 3), (40, 8, 3, 3), 1, 1, 1, 1),
    "one channel": ((1, 9), (8, 1, 3, 3), 1, 1, 1, 1),
    "a pixel": ((6, 9), (10, 6, 1, 1), 1, 0, 1, 1),
    "a pixel, with stride": ((6, 18), (10, 6, 1, 1), 2, 0, 1, 1),
    "a pixel, padded": ((6, 9), (10, 6, 1, 1), 1, 1, 1, 1),
    "a pixel, in groups": ((6, 9), (10, 3, 1, 1), 1, 0, 1, 2),
}
STAYING = {
    "larger weight than image": CASES["larger weight than image"],
    "few channels": ((3, 8), (4, 3, 3, 3), 1, 1, 1, 1),
    "few channels, with stride": ((4, 8), (3, 4, 3, 3), 2, 1, 1, 1),
}
"""With the channels first."""
PRODUCTS = {"a pixel": CASES["a pixel"], "a patch": ((3, 8), (6, 3, 4, 4), 4, 0, 1, 1)}


@pytest.mark.parametrize("comes", [LAST, torch.contiguous_format], ids=["channels last", "channels first"])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("case", CASES, ids=list(CASES))
def test_the_numbers_are_torchs_own(case: str, with_bias: bool, comes: torch.memory_format) -> None:
    """Values and gradients against torch's convolution in float64, to float32's rounding."""
    (channels, size), kernel, stride, padding, dilation, groups = CASES[case]
    generator = torch.Generator().manual_seed(0)
    along = (stride,) * 2, (padding,) * 2, (dilation,) * 2, groups
    leaves = [torch.randn(2, channels, size, size, generator=generator).contiguous(memory_format=comes)]
    leaves += [torch.randn(kernel, generator=generator)]
    leaves += [torch.randn(kernel[0], generator=generator)] if with_bias else []
    exact = [leaf.double().requires_grad_() for leaf in leaves]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    bias = (None,) * (not with_bias)
    expected = F.conv2d(*exact, *bias, *along)
    found = convolve_images(*leaves, *bias, *along, True)
    assert found.is_contiguous(memory_format=LAST)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    towards = torch.randn(expected.shape, generator=generator)
    (found * towards).sum().backward()
    (expected * towards.double()).sum().backward()
    for leaf, wide in zip(leaves, exact, strict=True):
        assert leaf.grad is not None
        assert wide.grad is not None
        torch.testing.assert_close(leaf.grad.double(), wide.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for CPUs with g++")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch's compiler
@pytest.mark.parametrize("case", STAYING | PRODUCTS)
def test_compiled_code_computes_the_same(case: str) -> None:
    """It lays out with the channels last whatever its own convolutions read."""
    (channels, size), kernel, stride, padding, dilation, groups = (STAYING | PRODUCTS)[case]
    along = (stride,) * 2, (padding,) * 2, (dilation,) * 2, groups
    torch.manual_seed(0)
    leaves = [torch.randn(shape, requires_grad=True) for shape in ((2, channels, size, size), kernel, kernel[:1])]

    def compute(X: torch.Tensor, W: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return convolve_images(X.sigmoid(), W, B, *along, True).tanh()

    def run(function: Any, *given: torch.Tensor) -> list[torch.Tensor]:
        result = function(*given)
        torch.manual_seed(1)
        return [result, *torch.autograd.grad(result, given, torch.randn(result.shape).to(result.dtype))]

    compiled = torch.compile(compute, dynamic=False, options=options_for(torch.device("cpu")))
    found, sources = run_and_get_code(run, compiled, *leaves)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = run(lambda X, W, B: F.conv2d(X.sigmoid(), W, B, *along).tanh(), *exact)
    for one, wide in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), wide, rtol=1e-5, atol=2e-5)
    assert all(("onward.convolution" in source) is (case in STAYING) for source in sources)


def test_images_of_one_channel_are_laid_out_channels_last_without_a_copy() -> None:
    """torch takes their usual strides for the other layout, and turns results and gradients."""
    images = torch.randn(2, 1, 6, 5)
    found = layout.channels_last(images)
    assert found.stride() == (30, 1, 5, 1)
    assert found.data_ptr() == images.data_ptr()
    assert torch.equal(found, images)
    assert F.conv2d(found, torch.randn(4, 1, 3, 3)).is_contiguous(memory_format=LAST)


@pytest.mark.parametrize(
    ("size", "channels", "is_converted"), [(8, 4, False), (9, 4, True), (8, 5, True), (16, 3, True)]
)
def test_small_images_of_few_channels_stay(size: int, channels: int, is_converted: bool) -> None:
    images, weight = torch.randn(2, 3, size, size), torch.randn(channels, 3, 3, 3)
    assert layout.pays(images.shape, weight.shape, (1, 1)) == is_converted
    assert layout.pays((2, 3, 2 * size, 2 * size), weight.shape, (2, 2)) == is_converted
    found = convolve_images(images, weight, None, (1, 1), (1, 1), (1, 1), 1, True)
    assert found.is_contiguous(memory_format=LAST if is_converted else torch.contiguous_format)
    torch.testing.assert_close(found, F.conv2d(images, weight, padding=1))


@pytest.mark.parametrize("shape", [(3, 1, 7, 2), (2, 1, 40, 3)])
def test_one_channel_that_becomes_one_column_has_torchs_numbers(shape: tuple[int, ...]) -> None:
    """torch 2.13 leaves parts of the result unwritten where the channels are last."""
    images, weight = torch.randn(shape), torch.randn(8, 1, 3, 2)
    expected = F.conv2d(images.double(), weight.double(), stride=(1, 3))
    for given in (images, images.as_strided(shape, (shape[2] * shape[3], 1, shape[3], 1))):
        found = convolve_images(given, weight, None, (1, 3), (0, 0), (1, 1), 1, True)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_it_can_be_turned_off() -> None:
    images, weight = torch.randn(2, 4, 6, 6), torch.randn(4, 4, 3, 3)
    along = (1, 1), (1, 1), (1, 1), 1
    plain = convolve_images(images, weight, None, *along, False)
    assert plain.is_contiguous()
    assert torch.equal(plain, F.conv2d(images, weight, None, *along))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_types_that_gain_nothing_stay_as_they_lie(dtype: torch.dtype) -> None:
    images, weight = torch.randn(2, 4, 6, 6, dtype=dtype), torch.randn(4, 4, 3, 3, dtype=dtype)
    assert convolve_images(images, weight, None, (1, 1), (1, 1), (1, 1), 1, True).is_contiguous()


def test_16_bits_under_autocast() -> None:
    images, weight = torch.randn(2, 4, 9, 9), torch.randn(8, 4, 1, 1)
    with torch.autocast("cpu", torch.bfloat16):
        found = convolve_images(images, weight, None, (1, 1), (0, 0), (1, 1), 1, True)
        expected = F.conv2d(images, weight)
    assert found.dtype == torch.bfloat16
    assert found.is_contiguous(memory_format=LAST)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)


def test_what_is_traced_holds_the_convolution_itself() -> None:
    """A graph that is exported, or given to a compiler, says what is computed and not how it is laid out."""

    def compute(images: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return convolve_images(images, weight, None, (1, 1), (0, 0), (1, 1), 1, True)

    traced = make_fx(compute)(torch.randn(1, 2, 3, 3), torch.randn(4, 2, 1, 1))
    assert [n.target for n in traced.graph.nodes if n.op == "call_function"] == [torch.ops.aten.convolution.default]


@pytest.mark.parametrize("function", [relu, gelu, hard_swish, swish, leaky_relu, elu], ids=lambda f: f.__name__)
def test_gradients_come_in_the_layout_of_their_images(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix made of images has a gradient with the channels first; small images take it as it comes."""
    monkeypatch.setattr(layout, "LEAST_BYTES", 2 * 3 * 5 * 5 * 4)
    gradients, came = [], []
    for comes in (LAST, torch.contiguous_format):
        for count in (2, 1):
            X = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0))[:count]
            X = X.contiguous(memory_format=comes).requires_grad_()
            Y = function(X)
            Y.register_hook(lambda g: came.append(g.is_contiguous(memory_format=LAST)))
            Y.flatten(1).square().sum().backward()
            gradients.append(X.grad)
    assert came == [True, False, False, False]
    for one, other in zip(gradients[:2], gradients[2:], strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("size", [(8, 8), (9, 11), (4, 4)], ids=str)
@pytest.mark.parametrize("channels", [1, 3, layout.MOST_CHANNELS_OF_PATCHES])
def test_patches_of_few_channels_are_one_product(
    size: tuple[int, int], channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients of torch's convolution in float64; what is left over at the edges has none."""
    torch.manual_seed(0)
    X, W, B = torch.randn(2, channels, *size), torch.randn(5, channels, 4, 2), torch.randn(5)
    exact = [tensor.double().requires_grad_() for tensor in (X, W, B)]
    expected = torch.nn.functional.conv2d(exact[0], exact[1], exact[2], stride=(4, 2))
    monkeypatch.setattr(torch.nn.functional, "conv2d", None)
    own = [tensor.requires_grad_() for tensor in (X, W, B)]
    result = layout.convolve_images(own[0], own[1], own[2], (4, 2), (0, 0), (1, 1), 1, True)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
    given = torch.randn_like(result)
    pairs = torch.autograd.grad(result, own, given), torch.autograd.grad(expected, exact, given.double())
    for mine, other in zip(*pairs, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("weight", "stride", "padding", "dilation"),
    [((5, 17, 2, 2), (2, 2), (0, 0), (1, 1)), ((5, 3, 3, 3), (2, 2), (0, 0), (1, 1)),
     ((5, 3, 2, 2), (2, 2), (1, 0), (1, 1)), ((5, 3, 2, 2), (2, 2), (0, 0), (1, 2)),
     ((5, 3, 1, 1), (1, 1), (0, 0), (1, 1))],
)  # fmt: skip
def test_other_windows_are_no_patches(weight: object, stride: object, padding: object, dilation: object) -> None:
    assert not layout.is_of_patches(weight, stride, padding, dilation)  # type: ignore[arg-type]
