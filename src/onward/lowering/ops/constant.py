"""Constants written as nodes: those that are themselves outputs; the others become initializers before lowering."""

from __future__ import annotations

import torch
from torch import Tensor

from onward.lowering.registry import lowers


@lowers("Constant", since=1)
def constant(
    *,
    value: Tensor | None = None,
    value_int: int | None = None,
    value_ints: tuple[int, ...] | None = None,
    value_float: float | None = None,
    value_floats: tuple[float, ...] | None = None,
    device: torch.device,
) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__Constant.html; strings are refused, and reading makes
    a `sparse_value` a `value` (graph/reading/sparse_tensors.py)."""
    if value is not None:
        return value.to(device)
    integers = value_int if value_int is not None else value_ints
    if integers is not None:
        return torch.tensor(integers, dtype=torch.int64, device=device)
    return torch.tensor(value_float if value_float is not None else value_floats, dtype=torch.float32, device=device)
