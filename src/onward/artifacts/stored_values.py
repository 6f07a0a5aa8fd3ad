"""Trained values in the element types that a file stores them in."""

from __future__ import annotations

import warnings

import numpy as np
import onnx_ir as ir
import torch

from onward.errors import NoteWarning

_NOT_NUMPY = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
}


def to_numpy(tensor: torch.Tensor, dtype: ir.DataType, name: str) -> np.ndarray:
    """The values of a weight in another type; those of bf16 and float8 as `ml_dtypes` has them.

    Warns:
        UserWarning: some are beyond the range of fp16.
    """
    if dtype in (ir.DataType.INT4, ir.DataType.UINT4):  # held one a byte, as torch has no such type
        return tensor.cpu().numpy().astype(dtype.numpy())
    target = ir.tensor_adapters.to_torch_dtype(dtype)
    narrow = tensor.to(device="cpu", dtype=target).contiguous()
    lost = int(narrow.isinf().sum()) - int(tensor.isinf().sum()) if _may_overflow(tensor.dtype, target) else 0
    if lost:
        warnings.warn(
            f"{lost} elements of the weight {name!r} are beyond the range of fp16, the model's type for it, and are "
            "written as infinite. Train with a smaller learning rate or with weight decay.",
            NoteWarning,
            stacklevel=2,
        )
    view = _NOT_NUMPY.get(target)
    return narrow.view(view).numpy().view(dtype.numpy()) if view is not None else narrow.numpy()


def _may_overflow(held: torch.dtype, stored: torch.dtype) -> bool:
    return stored is torch.float16 and held is not torch.float16
