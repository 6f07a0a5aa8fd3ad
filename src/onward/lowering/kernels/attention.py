"""Attention by torch's kernel, or on a CPU, where that does not apply, by matmuls and a softmax.

torch's kernel for CPUs has no gradient for a mask, for example. In its place torch computes the same matmuls, and
looks for rows without any key in passes over the scores.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from onward.lowering.kernels.dropout import drop
from onward.lowering.passes import is_plain


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    is_causal: bool = False,
    dropout: float = 0.0,
    enable_gqa: bool = False,
) -> Tensor:
    """`softmax(Q K' scale + mask) V`: `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        query, key, value: [B, H, L, D], [B, G, S, D], [B, G, S, E].
        mask: broadcasts to [B, H, L, S]; bool or float, no row of which hides all keys.
        scale: of the products.
        is_causal: query i sees the keys 0 to i.
        dropout: share of the probabilities that are set to zero.
        enable_gqa: H may be a multiple of G.
    """
    if mask is not None and not (is_causal or dropout or enable_gqa) and _is_learned(mask, query, key, value):
        result: Tensor = _Attention.apply(query, key, value, mask, scale)  # type: ignore[no-untyped-call]
        return result
    is_ours = torch.compiler.is_compiling() or (dropout > 0 and is_plain(query))
    if is_ours and not enable_gqa and _lacks_kernel(query, key, value, mask, dropout):
        return _decomposed(query, key, value, mask, scale, is_causal, dropout)
    return F.scaled_dot_product_attention(
        query, key, value, mask, dropout_p=dropout, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _is_learned(mask: Tensor, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a mask has a gradient, for plain attention in the type of the queries."""
    if not _has_gradient(mask) or query.device.type != "cpu" or query.dim() != 4:
        return False
    if torch.compiler.is_compiling() or not is_plain(query) or query.dtype not in (torch.float32, torch.float64):
        return False
    # Autocast chooses another type for each product; transforms of torch.func take no function of this kind.
    if torch.is_autocast_enabled("cpu") or any(map(is_functorch_wrapped_tensor, (query, key, value, mask))):
        return False
    return key.shape[:2] == value.shape[:2] == query.shape[:2] and mask.dtype is query.dtype


def _has_gradient(mask: Tensor) -> bool:
    return mask.requires_grad and torch.is_grad_enabled()


def _lacks_kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> bool:
    """Whether torch's kernel for CPUs does not take such arguments (`use_flash_attention_cpp` in sdp_utils_cpp.cpp)."""
    if query.device.type != "cpu" or query.dim() != 4:
        return False
    is_learned = mask is not None and _has_gradient(mask)
    is_strided = any(tensor.stride(-1) != 1 for tensor in (query, key, value))
    return is_learned or is_strided or dropout > 0 or query.shape[-1] != value.shape[-1]


def _decomposed(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, is_causal: bool, dropout: float
) -> Tensor:
    """The arguments of `attend`."""
    # Scaled scores would be reduced twice: torch's compiler (2.13) takes care of infinities in a softmax of them.
    scores = (query * scale) @ key.mT
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return drop(torch.softmax(scores, -1), dropout) @ value


class _Attention(torch.autograd.Function):
    """Keeps queries, keys, values and probabilities."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        """Scores, their softmax, and the values' means."""
        (batch, heads, length, _), count, width = query.shape, key.shape[2], value.shape[3]
        q, k, v = (tensor.flatten(0, 1) for tensor in (query, key, value))
        scores = torch.baddbmm(q.new_empty(()), q, k.mT, beta=0, alpha=scale)
        scores = scores.view(batch, heads, length, count)
        probabilities = torch.softmax(scores.add_(mask), -1)
        # Not q, k and v: they may be copies, to which a second derivative finds no way.
        ctx.save_for_backward(query, key, value, mask, probabilities)
        ctx.scale = scale
        return torch.bmm(probabilities.flatten(0, 1), v).view(batch, heads, length, width)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Those of two products and a softmax; the mask's is summed over the axes along which it was repeated."""
        query, key, value, mask, probabilities = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives
            return _recorded(query, key, value, mask, ctx.scale, gradients[0])
        q, k, v = (tensor.flatten(0, 1) for tensor in (query, key, value))
        batch, heads = probabilities.shape[:2]
        G, rows = gradients[0].flatten(0, 1), probabilities.flatten(0, 1)
        of_value = torch.bmm(rows.mT, G)
        of_rows = torch.bmm(G, v.mT)
        of_scores = torch.ops.aten._softmax_backward_data(of_rows, rows, -1, rows.dtype)
        of_mask = of_scores.view_as(probabilities).sum_to_size(mask.shape) if ctx.needs_input_grad[3] else None
        of_query, of_key = (
            torch.baddbmm(q.new_empty(()), left, right, beta=0, alpha=ctx.scale)
            for left, right in ((of_scores, k), (of_scores.mT, q))
        )
        shaped = (tensor.view(batch, heads, *tensor.shape[1:]) for tensor in (of_query, of_key, of_value))
        return *shaped, of_mask, None


def _recorded(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, gradient: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients by operators of torch, of which autograd knows the derivatives."""
    result = torch.softmax(query @ key.mT * scale + mask, -1) @ value
    inputs = [tensor for tensor in (query, key, value, mask) if tensor.requires_grad]
    found = iter(torch.autograd.grad(result, inputs, gradient, create_graph=True))
    return *(next(found) if tensor.requires_grad else None for tensor in (query, key, value, mask)), None
