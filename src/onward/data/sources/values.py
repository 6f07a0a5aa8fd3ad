"""One value of any library as a numpy array: torch tensors, lists, columns of frames, pictures."""

from __future__ import annotations

from typing import Any

import numpy as np

from onward.errors import DataError


def as_array(value: Any, name: str) -> np.ndarray:
    """The value as an array of numbers.

    Raises:
        DataError: it holds text or objects, or rows of unequal lengths.
    """
    array = _to_numpy(value, name)
    if array.dtype.kind == "O":
        array = _from_objects(array, name)
    if array.dtype.kind in "USOMm":
        raise DataError(
            f"feature {name!r} holds {_kind(array)}, not numbers; convert it before training: text to token ids, class "
            "names to numbers (numpy.unique(names, return_inverse=True)), dates to numbers."
        )
    return array


def is_numeric(value: Any) -> bool:
    """Whether a value can be a feature."""
    try:
        as_array(value, "")
    except DataError:
        return False
    return True


def rank_of(value: Any) -> int:
    """How many axes a value has."""
    ndim = getattr(value, "ndim", None)
    if isinstance(ndim, int):
        return ndim
    return 1 + (rank_of(value[0]) if len(value) else 0) if isinstance(value, list | tuple) else np.ndim(value)


def _to_numpy(value: Any, name: str) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach") and hasattr(value, "cpu"):
        return _from_torch(value, name)
    for convert in ("to_numpy", "__array__"):
        if hasattr(value, convert):
            return np.asarray(value.to_numpy() if convert == "to_numpy" else value)
    try:
        return np.asarray([_to_numpy(one, name) for one in value] if _holds_tensors(value) else value)
    except ValueError as error:
        raise DataError(_unequal(name)) from error


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and hasattr(value[0], "detach")


def _from_torch(tensor: Any, name: str) -> np.ndarray:
    if getattr(tensor, "is_sparse", False):
        raise DataError(f"feature {name!r} is a sparse tensor; pass it as a dense one: tensor.to_dense().")
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        import ml_dtypes
        import torch

        return np.asarray(tensor.contiguous().view(torch.int16).numpy()).view(ml_dtypes.bfloat16)
    return np.asarray(tensor.numpy())


def _from_objects(array: np.ndarray, name: str) -> np.ndarray:
    """Cells that are arrays or lists themselves, or numbers of mixed types; what is missing has no place in them."""
    cells = array.reshape(-1).tolist()
    missing = sum(cell is None for cell in cells)
    if missing:
        raise DataError(
            f"feature {name!r} has {missing} missing values of {len(cells)}; fill them in or leave out these samples."
        )
    if any(isinstance(cell, str | bytes | dict) for cell in cells):
        return array
    if not cells:
        return array.astype(np.float64)
    try:
        return np.stack([np.asarray(cell) for cell in cells]).reshape((*array.shape, *np.shape(cells[0])))
    except ValueError as error:
        raise DataError(_unequal(name)) from error


def _kind(array: np.ndarray) -> str:
    if array.dtype.kind in "Mm":
        return "dates" if array.dtype.kind == "M" else "durations"
    first = next(iter(array.reshape(-1).tolist()), None)
    return "text" if isinstance(first, str | bytes) else f"{type(first).__name__} objects"


def _unequal(name: str) -> str:
    return (
        f"feature {name!r} holds rows of unequal lengths, which form no array; pad or truncate them to one length, "
        "or pass a torch DataLoader whose collate_fn pads each batch."
    )
