"""Positions and places under the names of the domain com.microsoft: relative attention biases, sampled grids, pooling.

Their meaning is that of onnxruntime's documentation (docs/ContribOperators.md) and, of the bias, that of T5.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from onward.graph.nodes.structure import MICROSOFT
from onward.lowering.kernels.host import HostValue, flatten
from onward.lowering.ops.pooling import max_pool
from onward.lowering.ops.vision import grid_sample
from onward.lowering.registry import lowers, takes_attributes_of


@lowers("RelativePositionBias", domain=MICROSOFT, host=("query_length", "key_length"))
def relative_position_bias(
    bias_table: Tensor,
    query_length: HostValue,
    key_length: HostValue,
    *,
    is_bidirectional: int = 0,
    max_distance: int,
) -> Tensor:
    """T5's bias of attention: bias_table (buckets, heads) -> (1, heads, queries, keys).

    Near keys have a bucket for each distance, distant ones share buckets that widen up to `max_distance` (Raffel et
    al., 2020, section 2.1). Keys behind the query have half of the buckets, or all where attention looks back only.
    """
    (queries,), (keys,), device = flatten(query_length), flatten(key_length), bias_table.device
    distance = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None]
    buckets = bias_table.shape[0] // 2 if is_bidirectional else bias_table.shape[0]
    first = (distance > 0) * buckets if is_bidirectional else torch.zeros_like(distance)
    distance = distance.abs() if is_bidirectional else (-distance).clamp(min=0)
    exact = buckets // 2
    share = torch.log(distance.clamp(min=1).to(torch.float32) / exact) / math.log(max_distance / exact)
    wide = (exact + (share * (buckets - exact)).to(torch.int64)).clamp(max=buckets - 1)
    places = first + torch.where(distance < exact, distance, wide)
    return bias_table[places].permute(2, 0, 1).unsqueeze(0)


@lowers("GridSample", domain=MICROSOFT)
@takes_attributes_of(grid_sample)
def contrib_grid_sample(X: Tensor, Grid: Tensor, *, mode: str = "bilinear", **attributes: Any) -> Tensor:
    """GridSample as torch's exporter wrote it before opset 16 had it."""
    return grid_sample(X, Grid, mode=mode, **attributes)


@lowers("NhwcMaxPool", domain=MICROSOFT)
@takes_attributes_of(max_pool, without=("storage_order", "output_count"))
def nhwc_max_pool(x: Tensor, **attributes: Any) -> Tensor:
    """MaxPool of 8-bit numbers with the channels last."""
    return max_pool(x.movedim(-1, 1), output_count=1, **attributes)[0].movedim(1, -1)
