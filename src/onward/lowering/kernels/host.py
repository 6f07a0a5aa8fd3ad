"""Values that live in Python, not on a device: shapes, axes, sizes.

A host value is a number for a rank-0 tensor and nested tuples of numbers for higher ranks; the numbers may be
torch SymInts. Shape arithmetic on them costs no device memory and no synchronization
(docs/explanation/architecture.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

HostValue = int | float | bool | tuple[Any, ...]
"""A number, or nested tuples of numbers."""

LARGEST_HOST_ELEMENTS = 64
"""A constant with more elements than this is data, not shape arithmetic."""


def to_host(tensor: Any) -> HostValue:
    """The Python value of a tensor: a number, or nested tuples of numbers. Waits for the device."""
    if not isinstance(tensor, torch.Tensor):
        return tensor  # type: ignore[no-any-return]
    return freeze(tensor.tolist())


def freeze(value: Any) -> HostValue:
    """Lists become tuples, all the way down."""
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    return value  # type: ignore[no-any-return]


def to_tensor(value: HostValue, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The tensor that a host value stands for."""
    if not isinstance(value, tuple):
        return torch.full((), value, dtype=dtype, device=device)  # filled on the device: nothing to wait for
    return torch.tensor(value, dtype=dtype, device=device)


def host_shape(value: HostValue) -> tuple[int, ...]:
    """The shape of the tensor that a host value stands for; an empty tuple has shape (0,)."""
    shape: list[int] = []
    while isinstance(value, tuple):
        shape.append(len(value))
        if not value:
            break
        value = value[0]
    return tuple(shape)


def flatten(value: HostValue) -> list[Any]:
    """The numbers of a host value in row-major order."""
    if not isinstance(value, tuple):
        return [value]
    return [number for item in value for number in flatten(item)]


def unflatten(numbers: list[Any], shape: tuple[int, ...]) -> HostValue:
    """The host value of a shape that holds these numbers in row-major order."""
    if not shape:
        return numbers[0]  # type: ignore[no-any-return]
    step = math.prod(shape[1:])
    return tuple(unflatten(numbers[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0]))


def map_broadcast(function: Callable[..., Any], *values: HostValue) -> HostValue:
    """Applies a function number by number, the values broadcast against each other as arrays are.

    Raises:
        ValueError: the shapes do not broadcast.
    """
    if not any(isinstance(value, tuple) for value in values):
        return function(*values)  # type: ignore[no-any-return]
    shapes = [host_shape(value) for value in values]
    rank = max(len(shape) for shape in shapes)
    raised = list(values)
    for index, shape in enumerate(shapes):
        for _ in range(rank - len(shape)):
            raised[index] = (raised[index],)
    return _map_level(function, raised, rank)


def _map_level(function: Callable[..., Any], values: list[Any], depth: int) -> HostValue:
    if depth == 0:
        return function(*values)  # type: ignore[no-any-return]
    lengths = {len(value) for value in values}
    if len(lengths - {1}) > 1:
        raise ValueError(f"lengths {sorted(lengths)} along one axis do not broadcast.")
    length = max(lengths) if 0 not in lengths else 0
    return tuple(
        _map_level(function, [value[i if len(value) > 1 else 0] for value in values], depth - 1) for i in range(length)
    )
