"""Products by oneDNN: torch's own numbers and gradients, and only where they are worth it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import onward.lowering.kernels.matmuls as products
from onward.lowering.kernels.matmuls import faster_linear, linear, multiply, prefers_onednn
from onward.lowering.ops.linear import gemm, matmul

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
pytestmark = pytest.mark.skipif(not HAS_ONEDNN, reason="this torch has no oneDNN")


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """As on an AMD processor, for products of 1,000 operations and more; the shapes that oneDNN was asked for."""
    shapes: list[tuple[int, ...]] = []
    original = products._by_onednn

    def ask(X: Tensor, W: Tensor, B: Tensor | None) -> Tensor:
        shapes.append((*X.shape, W.shape[0]))
        return original(X, W, B)

    monkeypatch.setattr(products, "prefers_onednn", lambda: True)
    monkeypatch.setattr(products, "WORTHWHILE_FLOPS", 1000)
    monkeypatch.setattr(products, "_by_onednn", ask)
    return shapes


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def differentiated(call: Any, leaves: list[Tensor]) -> list[Tensor]:
    leaves = [leaf.detach().clone(memory_format=torch.preserve_format).requires_grad_() for leaf in leaves]
    result = call(*leaves)
    result.backward(torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view(result.shape))
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("transposed", [False, True], ids=["rows are outputs", "rows are inputs"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(12, 20), (3, 4, 20), (1, 20)])
def test_values_and_gradients(
    shape: tuple[int, ...], with_bias: bool, transposed: bool, asked: list[tuple[int, ...]]
) -> None:
    """Against float64, within float32's rounding of sums of 20 products."""
    torch.manual_seed(0)
    weight = draw(20, 30).T if transposed else draw(30, 20)
    leaves = [draw(*shape), weight, *([draw(30)] if with_bias else [])]
    expected = differentiated(F.linear, [leaf.double() for leaf in leaves])
    found = differentiated(linear, leaves)
    assert len(asked) == 2, "forward, and for the gradient of what came in"
    for one, exact in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=1e-5)


def test_gradients_of_gradients(asked: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    leaves = [draw(6, 10), draw(20, 10), draw(20)]

    def second(call: Any, given: list[Tensor]) -> tuple[Tensor, ...]:
        given = [tensor.detach().requires_grad_() for tensor in given]
        first = torch.autograd.grad(call(*given).pow(3).sum(), given, create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in first), given)  # type: ignore[arg-type]

    for one, exact in zip(second(linear, leaves), second(F.linear, [x.double() for x in leaves]), strict=True):
        torch.testing.assert_close(one.double(), exact, rtol=1e-4, atol=1e-3 * float(exact.abs().max()))
    assert asked


def test_matmul_and_gemm_use_it(asked: list[tuple[int, ...]]) -> None:
    A, B, C = draw(2, 8, 20), draw(20, 30), draw(30)
    torch.testing.assert_close(matmul(A, B), torch.matmul(A, B), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gemm(A[0], B, C), torch.addmm(C, A[0], B), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gemm(A[0], B.T.contiguous(), transB=1), A[0] @ B, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(multiply(A[1], B, C), torch.addmm(C, A[1], B), rtol=1e-5, atol=1e-5)
    assert asked == [(2, 8, 20, 30), (8, 20, 30), (8, 20, 30), (8, 20, 30)]
    torch.testing.assert_close(gemm(A[0], B, C, alpha=0.5), torch.addmm(C, A[0], B, alpha=0.5))
    torch.testing.assert_close(gemm(A[0], B, draw(8, 30)).shape, torch.Size([8, 30]))
    torch.testing.assert_close(matmul(A, draw(2, 20, 3)).shape, torch.Size([2, 8, 3]))
    torch.testing.assert_close(matmul(draw(20), B).shape, torch.Size([30]))
    assert len(asked) == 4, "scaled, with a whole matrix added, in batches, of a vector: torch's own"


def test_small_wide_and_16_bit_products_are_torchs_own(asked: list[tuple[int, ...]]) -> None:
    assert faster_linear(draw(4, 5), draw(5, 20)) is None, "800 operations"
    assert faster_linear(draw(40, 5), draw(5, 20)) is not None
    assert faster_linear(draw(40, 5, dtype=torch.float64), draw(5, 20, dtype=torch.float64)) is None
    assert faster_linear(draw(40, 5, dtype=torch.bfloat16), draw(5, 20, dtype=torch.bfloat16)) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert faster_linear(draw(40, 5), draw(5, 20)) is None
        assert linear(draw(40, 5), draw(20, 5)).dtype == torch.bfloat16
    assert len(asked) == 1


def test_what_is_traced_is_torchs_own(asked: list[tuple[int, ...]]) -> None:
    traced = make_fx(lambda x, w: matmul(x, w))(draw(40, 5), draw(5, 20))
    assert [n.target for n in traced.graph.nodes if n.op == "call_function"] == [torch.ops.aten.mm.default]
    assert not asked


def test_functions_of_torch_func_get_torchs_own(asked: list[tuple[int, ...]]) -> None:
    weight, many = draw(5, 20), draw(3, 40, 5)
    of_one = torch.func.grad(lambda x: matmul(x, weight).sum())(many[0])
    torch.testing.assert_close(of_one, weight.sum(1).expand(40, 5), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.func.vmap(lambda x: matmul(x, weight))(many), many @ weight, rtol=1e-5, atol=1e-5)
    assert not asked


def test_other_processors_keep_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "is_amd", lambda: False)
    prefers_onednn.cache_clear()
    assert not prefers_onednn()
    monkeypatch.setattr(products, "is_amd", lambda: True)
    prefers_onednn.cache_clear()
    assert prefers_onednn() == torch.backends.mkl.is_available()
    prefers_onednn.cache_clear()
