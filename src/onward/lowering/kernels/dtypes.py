"""ONNX element types and torch dtypes, and how a stored ONNX tensor becomes a torch tensor.

4-bit and 2-bit integers have no torch arithmetic: they are held unpacked, one element a byte, in int8 or uint8.
So are 4-bit and 6-bit floats, in float8_e4m3fn, which holds every value of theirs.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch

from onward.errors import ModelError
from onward.untrusted_files import open_regular

TORCH_DTYPE: dict[ir.DataType, torch.dtype] = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.DOUBLE: torch.float64,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.INT8: torch.int8,
    ir.DataType.INT16: torch.int16,
    ir.DataType.INT32: torch.int32,
    ir.DataType.INT64: torch.int64,
    ir.DataType.UINT8: torch.uint8,
    ir.DataType.UINT16: torch.uint16,
    ir.DataType.UINT32: torch.uint32,
    ir.DataType.UINT64: torch.uint64,
    ir.DataType.BOOL: torch.bool,
    ir.DataType.COMPLEX64: torch.complex64,
    ir.DataType.COMPLEX128: torch.complex128,
    ir.DataType.FLOAT8E4M3FN: torch.float8_e4m3fn,
    ir.DataType.FLOAT8E4M3FNUZ: torch.float8_e4m3fnuz,
    ir.DataType.FLOAT8E5M2: torch.float8_e5m2,
    ir.DataType.FLOAT8E5M2FNUZ: torch.float8_e5m2fnuz,
    ir.DataType.FLOAT8E8M0: torch.float8_e8m0fnu,
    ir.DataType.FLOAT4E2M1: torch.float8_e4m3fn,
    ir.DataType.INT4: torch.int8,
    ir.DataType.UINT4: torch.uint8,
    ir.DataType.INT2: torch.int8,
    ir.DataType.UINT2: torch.uint8,
}
"""ONNX element type -> torch dtype."""

_FLOAT6 = [ir.DataType[name] for name in ("FLOAT6E2M3", "FLOAT6E3M2") if name in ir.DataType.__members__]
"""Floats of 6 bits, which onnx-ir knows from 1.1 on."""

TORCH_DTYPE |= dict.fromkeys(_FLOAT6, torch.float8_e4m3fn)

LOW_PRECISION = (torch.float16, torch.bfloat16)
"""Types whose sums are computed in float32."""

SMALL_FLOATS = frozenset({ir.DataType.FLOAT4E2M1, *_FLOAT6})
"""Floats of fewer than 8 bits, held unpacked in float8_e4m3fn."""

_BIT_VIEW: dict[torch.dtype, type[np.generic]] = {
    torch.bfloat16: np.int16,
    torch.float8_e4m3fn: np.uint8,
    torch.float8_e4m3fnuz: np.uint8,
    torch.float8_e5m2: np.uint8,
    torch.float8_e5m2fnuz: np.uint8,
    torch.float8_e8m0fnu: np.uint8,
}


_ML_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _BIT_VIEW}
"""Name of a dtype in ml_dtypes -> the torch dtype."""


def torch_dtype(data_type: ir.DataType | int, where: str) -> torch.dtype:
    """The torch dtype of an ONNX element type; `where` names the value in the error.

    Raises:
        ModelError: torch has no such type (strings).
    """
    data_type = ir.DataType(data_type)
    if data_type not in TORCH_DTYPE:
        raise ModelError(f"{where} has element type {data_type.name}, which torch cannot hold.")
    return TORCH_DTYPE[data_type]


def tensor_from_ir(tensor: ir.TensorProtocol, where: str) -> torch.Tensor:
    """A torch tensor with its own memory that holds what an ONNX tensor holds.

    Raises:
        ModelError: torch has no such type, or a file has become shorter since it was checked.
    """
    dtype = torch_dtype(tensor.dtype, where)
    array = tensor.numpy()
    if tensor.dtype in SMALL_FLOATS:
        array = array.astype(ml_dtypes.float8_e4m3fn)
    elif tensor.dtype in (ir.DataType.INT4, ir.DataType.INT2):
        array = array.astype(np.int8)
    elif tensor.dtype in (ir.DataType.UINT4, ir.DataType.UINT2):
        array = array.astype(np.uint8)
    # In torch's memory: numpy asks for huge pages, which took four times as long to get where memory is fragmented.
    own = torch.empty(tuple(array.shape), dtype=dtype)
    own_bytes = own.reshape(-1).view(torch.uint8).numpy()
    if isinstance(tensor, ir.ExternalTensor) and _READ_BYTES <= array.nbytes == tensor.nbytes == own_bytes.nbytes:
        _read_file(tensor, own_bytes, where)
    else:
        own_bytes.view(array.dtype).reshape(array.shape)[...] = array
    return own


_READ_BYTES = 2**20
"""Tensors in files of their own from this size on are read; of smaller ones the calls cost more than page faults."""


def _read_file(tensor: ir.ExternalTensor, into: np.ndarray, where: str) -> None:
    """Reads what `numpy()` has mapped, and found in the model's folder: without a page fault for each 4 kB of it."""
    left = into.data
    with open_regular(tensor.path) as file:
        file.seek(tensor.offset or 0)
        while left and (count := file.readinto(left)):
            left = left[count:]
    if left:
        raise ModelError(
            f"{where}: the file {str(tensor.location)!r} now ends {len(left)} bytes too early; copy it again."
        )


def tensor_from_array(array: np.ndarray) -> torch.Tensor:
    """A torch tensor over the memory of a numpy array, types that only ml_dtypes gives to numpy included."""
    # A built-in type has no need of its name, which numpy takes longer to put together than torch to make the tensor.
    if array.dtype.isbuiltin == 1 or array.dtype.name not in _ML_DTYPES:
        return torch.from_numpy(array)
    dtype = _ML_DTYPES[array.dtype.name]
    return torch.from_numpy(array.view(_BIT_VIEW[dtype])).view(dtype)


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """float32 for types of low precision, else the type itself."""
    return torch.float32 if dtype in LOW_PRECISION else dtype


def wide_on_cpus(tensor: torch.Tensor) -> torch.dtype:
    """float32 for a tensor of low precision on a CPU, where torch adds in the tensor's own type; else that."""
    return wide_type(tensor.dtype) if tensor.is_cpu else tensor.dtype


def is_trainable(data_type: ir.DataType | None) -> bool:
    """Whether a tensor of this type can carry a gradient."""
    return data_type in (
        ir.DataType.FLOAT,
        ir.DataType.DOUBLE,
        ir.DataType.FLOAT16,
        ir.DataType.BFLOAT16,
    )
