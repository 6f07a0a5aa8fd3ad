"""Packed integers are unpacked as onnx unpacks them; a file's are held packed, and compute as in onnxruntime."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch

from onward.lowering.ops.stored_weights import unpack


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.int2, ml_dtypes.uint2])
def test_every_number_of_every_type(dtype: Any) -> None:
    info = ml_dtypes.iinfo(dtype)
    numbers = np.resize(np.arange(info.min, info.max + 1), (3, 7)).astype(dtype)
    packed = np.frombuffer(ir.Tensor(numbers).tobytes(), np.uint8).copy()
    found = unpack(torch.from_numpy(packed), bits=info.bits, signed=int(info.min < 0), shape=(3, 7))
    assert found.tolist() == numbers.astype(int).tolist()
