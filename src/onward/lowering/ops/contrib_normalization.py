"""Normalizations of the domain com.microsoft, fused with what is before them.

Their meaning is that of onnxruntime's documentation (docs/ContribOperators.md) and of its CPU kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onward.graph.nodes.structure import MICROSOFT
from onward.lowering.kernels import large_means
from onward.lowering.kernels.dtypes import wide_type
from onward.lowering.kernels.embeddings import look_up
from onward.lowering.ops.normalization import layer_normalization, rms_normalization
from onward.lowering.registry import lowers, takes_attributes_of

# onnxruntime's optimizer writes it in the standard's domain, whatever opset the model has.
lowers("LayerNormalization")(layer_normalization)


@lowers("SkipLayerNormalization", domain=MICROSOFT)
def skip_layer_normalization(
    input: Tensor,
    skip: Tensor,
    gamma: Tensor,
    beta: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
    output_count: int,
) -> tuple[Tensor | None, ...]:
    """LayerNormalization of `input + skip + bias`; outputs Y, mean, inverse deviation, and the sum.

    onnxruntime asks for the sum alone and leaves the statistics unnamed: then they are not computed.
    """
    total = input + skip if bias is None else input + skip + bias
    count = 3 if output_count in (2, 3) else 1
    Y, *statistics = layer_normalization(total, gamma, beta, epsilon=epsilon, output_count=count)
    return (Y, *(statistics or (None, None)), total)[:output_count]


@lowers("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_simplified_layer_normalization(
    input: Tensor,
    skip: Tensor,
    gamma: Tensor,
    bias: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
    output_count: int,
) -> tuple[Tensor | None, ...]:
    """RMSNormalization of `input + skip + bias`; outputs Y, nothing, the inverse root mean square, and the sum.

    As in SkipLayerNormalization the statistic is computed only where the sum is not asked for.
    """
    total = input + skip if bias is None else input + skip + bias
    count = 2 if output_count == 3 else 1
    Y, *inverse = simplified_layer_normalization(total, gamma, epsilon=epsilon, output_count=count)
    return (Y, None, *(inverse or (None,)), total)[:output_count]


@lowers("SimplifiedLayerNormalization")
def simplified_layer_normalization(
    X: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1, output_count: int
) -> tuple[Tensor, ...]:
    """RMSNormalization under the name that onnxruntime gives it in the standard's domain; outputs Y and 1 / RMS."""
    Y = rms_normalization(X, scale, axis=axis, epsilon=epsilon, stash_type=stash_type)
    if output_count == 1:
        return (Y,)
    wide = X.to(wide_type(X.dtype))
    axes = tuple(range(axis % X.dim(), X.dim()))
    return Y, (wide.square().mean(dim=axes, keepdim=True) + epsilon).rsqrt()


@lowers("GroupNorm", domain=MICROSOFT)
def group_norm(
    X: Tensor,
    gamma: Tensor,
    beta: Tensor,
    *,
    activation: int,
    channels_last: int = 1,
    epsilon: float = 1e-5,
    groups: int,
) -> Tensor:
    """Group normalization, by default with the channels last; `activation=1` is SiLU."""
    x = X.movedim(-1, 1) if channels_last else X
    Y = large_means.group_norm(x, groups, gamma.to(x.dtype), beta.to(x.dtype), epsilon)
    Y = F.silu(Y) if activation else Y
    return Y.movedim(1, -1) if channels_last else Y


@lowers("SkipGroupNorm", domain=MICROSOFT)
@takes_attributes_of(group_norm)
def skip_group_norm(
    X: Tensor,
    gamma: Tensor,
    beta: Tensor,
    skip: Tensor,
    bias: Tensor | None = None,
    *,
    channels_last: int = 1,
    output_count: int,
    **attributes: Any,
) -> tuple[Tensor, ...]:
    """GroupNorm of `X + skip + bias`; outputs Y and the sum. `skip` may be (N, C)."""
    if skip.dim() == 2:
        spatial = [1] * (X.dim() - 2)
        skip = skip.reshape(skip.shape[0], *spatial, -1) if channels_last else skip.reshape(*skip.shape, *spatial)
    if bias is not None and not channels_last:
        bias = bias.reshape(-1, *[1] * (X.dim() - 2))
    total = X + skip if bias is None else X + skip + bias
    Y = group_norm(total, gamma, beta, channels_last=channels_last, **attributes)
    return (Y, total)[:output_count]


@lowers("EmbedLayerNormalization", domain=MICROSOFT)
def embed_layer_normalization(
    input_ids: Tensor,
    segment_ids: Tensor | None,
    word_embedding: Tensor,
    position_embedding: Tensor,
    segment_embedding: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
    mask_index_type: int = 0,
    output_count: int,
) -> tuple[Tensor, ...]:
    """LayerNormalization of the sum of BERT's embeddings; input_ids (B, L), the tables (rows, H).

    Outputs: the result, the number of attended tokens of each sequence (int32, zero without a mask), and the sum.
    """
    if position_ids is None:
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
    total = look_up(word_embedding, input_ids) + look_up(position_embedding, position_ids)
    if segment_ids is not None and segment_embedding is not None:
        total = total + look_up(segment_embedding, segment_ids)
    (Y,) = layer_normalization(total, gamma, beta, epsilon=epsilon, output_count=1)
    if mask is None:
        lengths = torch.zeros(input_ids.shape[0], dtype=torch.int32, device=input_ids.device)
    else:
        lengths = (mask == 1).sum(1).to(torch.int32)
    return (Y, lengths, total)[:output_count]
