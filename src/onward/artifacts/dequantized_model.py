"""A quantized model written in real numbers, as a file that trains: what `onward export --dequantize` does."""

from __future__ import annotations

import os
from pathlib import Path

from onward.errors import ModelError
from onward.graph.dequantization.passes import Dequantized, dequantize
from onward.graph.writing.model_saving import save_model
from onward.parameters.limits import DEFAULT_LIMITS, Limits


def write_dequantized(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    keep_rounding: bool = True,
    limits: Limits = DEFAULT_LIMITS,
) -> Dequantized:
    """Writes a quantized model with float32 parameters instead of its stored integers.

    Args:
        source: the quantized model; it is not changed.
        path: of the file to write.
        keep_rounding, limits: see `onward.graph.dequantization.passes.dequantize`.

    Raises:
        ModelError: the model cannot be read, nothing in it is quantized, or `path` is the model itself.
        StorageError: the file system refuses.
    """
    target = Path(path)
    if target.resolve() == Path(source).resolve():
        raise ModelError(f"the dequantized model cannot be written over the model itself, {str(target)!r}.")
    result = dequantize(source, keep_rounding=keep_rounding, limits=limits)
    save_model(result.model, target)
    return result
