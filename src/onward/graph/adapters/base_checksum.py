"""The checksum of the model that adapters are of: a checkpoint that holds adapters alone names its base by it."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir
import xxhash

from onward.graph.reading.tensor_storage import close_file


def base_checksum(source: ir.Model, adapters: Collection[str]) -> str:
    """Of all stored tensors of the user's own graph, names and shapes included; "" without adapters."""
    if not adapters:
        return ""
    checksum = xxhash.xxh3_128()
    for one in source.graphs():
        for name, value in one.initializers.items():
            tensor = value.const_value
            if tensor is None or tensor.dtype is ir.DataType.STRING:
                continue
            checksum.update(f"{name} {tensor.dtype.name} {list(tensor.shape.numpy())};".encode())
            checksum.update(tensor.tobytes())
            close_file(tensor)
    return str(checksum.hexdigest())


def why_other_base(recorded: str, own: str) -> str:
    """What to report of adapters whose base is not the model at hand; "" where it is."""
    if not recorded or not own or recorded == own:
        return ""
    return (
        f"it holds adapters of a base model with the checksum {recorded}, but the model has {own}: its weights were "
        "changed since. Give the ONNX file that the adapters were trained on, or start over with another "
        "checkpoint.checkpoints_dir."
    )
