"""What a specialized program knows of its tensors: nodes note the shapes and types of what they give."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

FACT = "tensor"
"""Under this name the nodes of specialized programs note the shapes and types of what they give."""


class TensorFact(NamedTuple):
    """The shape and the type of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of a tensor without gaps."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def fact_of(value: Any) -> Any:
    """What is known of a value: a `TensorFact`, a tuple of them for several tensors, None for anything else."""
    if isinstance(value, Tensor):
        known = all(isinstance(size, int) for size in value.shape)
        return TensorFact(tuple(value.shape), value.dtype) if known and value.layout is torch.strided else None
    if isinstance(value, tuple | list) and value and all(isinstance(item, Tensor) for item in value):
        return tuple(fact_of(item) for item in value)
    return None


def fact_about(value: Any) -> TensorFact | None:
    """What is noted of an argument of a specialized program; None where it is no tensor of known shape."""
    found = value.meta.get(FACT) if isinstance(value, fx.Node) else None
    return found if isinstance(found, TensorFact) else None
