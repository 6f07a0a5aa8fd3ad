"""Products of matrices on CPUs, by the faster of two libraries that torch has: MKL, which it asks itself, or oneDNN.

On AMD's processors MKL keeps to the narrower of their instructions; oneDNN does not.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from onward.operating_system import is_amd

WORTHWHILE_FLOPS = 2**23
"""Floating point operations of a product for which oneDNN, which takes some microseconds to begin, is asked."""


def linear(X: Tensor, W: Tensor, B: Tensor | None = None) -> Tensor:
    """`X W' + B` of X [..., K], W [N, K] and B [N]: `torch.nn.functional.linear`."""
    faster = faster_linear(X, W.T, B)
    return F.linear(X, W, B) if faster is None else faster


def faster_linear(X: Tensor, W: Tensor, B: Tensor | None = None) -> Tensor | None:
    """`X W + B` of X [..., K], W [K, N] and B [N]; None for other shapes, and where torch's own are no slower."""
    if X.dim() < 2 or W.dim() != 2 or X.shape[-1] != W.shape[0] or not (B is None or B.shape == W.shape[1:]):
        return None
    if not _gains(X, W, B):
        return None
    result: Tensor = _Linear.apply(X, W.T, B)  # type: ignore[no-untyped-call]
    return result


def multiply(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """`left right + bias` of left [M, K], right [K, N] and bias [N], without a gradient."""
    if _gains(left, right, bias):
        return _by_onednn(left, right.T, bias)
    return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """`total + left right` of total [M, N], left [M, K] and right [K, N], without a gradient; total may be changed."""
    if total.dtype != left.dtype:
        return total.add_(multiply(left, right))
    if total.is_contiguous() and _gains(left, right, None):
        result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(left, total, right.T, None, "add")
        return result
    return total.addmm_(left, right)


def gradient_of_weight(X: Tensor, G: Tensor, W: Tensor, is_transposed: bool = False) -> Tensor:
    """The gradient of W from X [M, K] and the gradient G [M, N] of `X W`, laid out in memory like W.

    Args:
        X, G: as above.
        W: [K, N], or [N, K] of `X W'` if `is_transposed`.
    """
    if is_transposed:
        return torch.mm(X.T, G).T if W.stride(1) != 1 else torch.mm(G.T, X)
    return torch.mm(G.T, X).T if W.stride(0) == 1 else torch.mm(X.T, G)


def _gains(left: Tensor, right: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN is to multiply left [..., K] and right [K, N]: in float32, outside of tracing and autocast."""
    # This is asked before every product: what is quick to find out, and often says no, comes first.
    if torch.compiler.is_compiling() or not prefers_onednn() or not (_is_usual(left) and _is_usual(right)):
        return False
    return (
        2 * left.numel() * right.shape[1] >= WORTHWHILE_FLOPS
        and (bias is None or _is_usual(bias))
        and not torch.is_autocast_enabled("cpu")
        and not (_len_torch_dispatch_stack() and get_proxy_mode() is not None)
    )


def _is_usual(tensor: Tensor) -> bool:
    """Whether it has float32 numbers on the CPU, and no wrapper of `torch.func` around it."""
    return (
        tensor.dtype is torch.float32
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.is_cpu
        and not is_functorch_wrapped_tensor(tensor)
    )


def _by_onednn(X: Tensor, W: Tensor, B: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise.default(X, W, B, "none", [], "")
    return result


_SCHEMAS = {
    "default": "mkldnn::_linear_pointwise(Tensor X, Tensor W, Tensor? B, str attr, ",
    "binary": "mkldnn::_linear_pointwise.binary(Tensor X, Tensor other, Tensor W, Tensor? B, str attr)",
}


@functools.cache
def prefers_onednn() -> bool:
    """Whether this machine's processor is one on which oneDNN is the faster, and torch has it."""
    has_both = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    if not (has_both and is_amd()):
        return False
    operator = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    # It is what torch's compiler calls, and no promise: another version may want other arguments.
    return operator is not None and all(
        str(getattr(getattr(operator, name, None), "_schema", "")).startswith(schema)
        for name, schema in _SCHEMAS.items()
    )


class _Linear(torch.autograd.Function):
    """`linear` by oneDNN; the gradient of the weight stays with MKL, which is the faster at it."""

    @staticmethod
    def forward(ctx: Any, X: Tensor, W: Tensor, B: Tensor | None) -> Tensor:
        """Keeps the weight, and X for the gradient of a weight that has one."""
        ctx.shape = X.shape
        ctx.save_for_backward(X if ctx.needs_input_grad[1] else None, W)
        return _by_onednn(X, W, B)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Can itself be differentiated."""
        X, W = ctx.saved_tensors
        G = gradients[0].reshape(-1, gradients[0].shape[-1])
        of_x = of_w = of_b = None
        if ctx.needs_input_grad[0]:
            of_x = linear(G, W.T).reshape(ctx.shape)
        if ctx.needs_input_grad[1]:
            of_w = gradient_of_weight(X.reshape(-1, X.shape[-1]), G, W.T).T
        if ctx.needs_input_grad[2]:
            of_b = G.sum(0)
        return of_x, of_w, of_b
