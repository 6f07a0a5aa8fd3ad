"""What one rank holds of a tensor of the run, and where in the whole tensor it belongs. Saving and loading see a run of
any layout as a mapping from names to pieces, a run of one process as one whose pieces are whole."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from onward.plan.shards import Box


@dataclass(frozen=True)
class Piece:
    """A rank's part of a tensor.

    Attributes:
        tensor: the rank's own, a plain tensor on any device; read from and written to in place.
        whole_shape: of the tensor that all ranks hold together.
        boxes: which elements of the whole these are; empty where a rank holds nothing of it.
        is_written: False where another rank writes the same boxes into a checkpoint.
    """

    tensor: torch.Tensor
    whole_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    is_written: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError where a box is not inside the tensors."""
        local_shape = tuple(self.tensor.shape)
        for box in self.boxes:
            if not _is_inside(box.whole_offsets, box.sizes, self.whole_shape):
                raise ValueError(f"{box} is not inside a tensor of shape {list(self.whole_shape)}")
            if not _is_inside(box.local_offsets, box.sizes, local_shape):
                raise ValueError(f"{box} is not inside a rank's tensor of shape {list(local_shape)}")

    @staticmethod
    def whole(tensor: torch.Tensor, is_written: bool = True) -> Piece:
        """The piece of a rank that holds all of a tensor."""
        shape = tuple(tensor.shape)
        zeros = (0,) * len(shape)
        return Piece(tensor, shape, (Box(zeros, shape, zeros),), is_written)

    @property
    def num_elements(self) -> int:
        """Elements of all boxes together."""
        return sum(math.prod(box.sizes) for box in self.boxes)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> `float32`, for files and messages."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """`float32` -> `torch.float32`.

    Raises:
        ValueError: torch has no such type.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no type of elements; expected a name such as float32")
    return dtype


def _is_inside(offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    if not len(offsets) == len(sizes) == len(shape):
        return False
    return all(start >= 0 and start + length <= size for start, length, size in zip(offsets, sizes, shape, strict=True))
