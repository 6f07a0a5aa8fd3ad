"""What a safetensors file of a checkpoint can hold, and what its metadata say; without torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch

OFFSETS_KEY = "DCP_SHARDING_INFO"
"""Of a file's metadata: JSON, for every key where in the full tensor the shard begins."""

NAMES_KEY = "ONWARD_TENSOR_NAMES"
"""Of a file's metadata: JSON, the tensor's name for every key that is not one itself; absent where there is none."""

SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}


def refuse_unstorable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError for a name or dtype that a safetensors file cannot hold."""
    for name, tensor in tensors.items():
        if name == "__metadata__":
            raise ValueError("a tensor cannot be named '__metadata__': safetensors files use that name themselves")
        try:
            name.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"the tensor name {name!r} is not valid Unicode: {error}") from error
        if tensor.dtype not in SAFETENSORS_DTYPES:
            raise ValueError(f"tensor {name!r} is of {tensor.dtype}, which a safetensors file cannot hold")
