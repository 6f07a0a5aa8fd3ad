"""A batch of one image, whose strides can say two things: torch's batch normalization then gives wrong gradients.

The stride of an axis of one element means nothing, and views leave any number there. torch takes such an image for
channels-last in one place of its kernel and for the plain layout in another (2.13 and before).
"""

from __future__ import annotations

import torch
from torch import Tensor

from onward.lowering.passes import is_plain


def canonicalize_strides(X: Tensor) -> Tensor:
    """X [N, C, ...], copied if it is one image whose strides do not determine its layout."""
    if X.dim() not in (4, 5) or X.shape[0] != 1 or X.stride(0) >= X.numel():
        return X
    last = torch.channels_last if X.dim() == 4 else torch.channels_last_3d
    if X.is_contiguous() and X.stride(1) != 1:
        return X.clone(memory_format=torch.contiguous_format)
    return X.clone(memory_format=last) if X.is_contiguous(memory_format=last) else X


def with_canonical_gradient(Y: Tensor) -> Tensor:
    """Y [N, C, ...]; the gradient that reaches its operator has canonical strides."""
    if Y.dim() in (4, 5) and Y.shape[0] == 1 and Y.requires_grad and not torch.compiler.is_compiling() and is_plain(Y):
        Y.register_hook(canonicalize_strides)  # type: ignore[no-untyped-call]
    return Y
