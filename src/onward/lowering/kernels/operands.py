"""Operands of elementwise operators: tensors, or Python numbers where the program knows them, and how they broadcast.

A number needs no memory and no launch of its own, so an operator takes it as it is wherever the result keeps the
other operand's shape.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onward.lowering.kernels.host import HostValue, to_tensor

REQUIRED = inspect.Parameter.empty
MARK = "takes_numbers"
"""The attribute of the functions that `takes_numbers` makes."""


def takes_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lets an elementwise function of two tensors take host values for either of them.

    The wrapped function is called with two tensors, or with a tensor and a number that broadcasts to its shape. To
    be registered with `either=` the names of both its parameters. Where both are host values, the first becomes a
    tensor of the type that the program knows for it.
    """
    unknown = torch.device("cpu")

    @functools.wraps(function)
    def call(
        A: Any,
        B: Any,
        *,
        device: torch.device = unknown,
        dtypes: tuple[torch.dtype | None, ...] = (None, None),
        **keywords: Any,
    ) -> Any:
        if isinstance(A, Tensor):
            return function(A, B if isinstance(B, Tensor) else operand_for(B, A, dtypes[1]), **keywords)
        if isinstance(B, Tensor):
            return function(operand_for(A, B, dtypes[0]), B, **keywords)
        assert dtypes[0] is not None
        A = to_tensor(A, dtypes[0], device)
        return function(A, operand_for(B, A, dtypes[1]), **keywords)

    keyword = inspect.Parameter.KEYWORD_ONLY
    reserved = [inspect.Parameter(name, keyword) for name in ("device", "dtypes")]
    parameters = [*inspect.signature(function).parameters.values(), *reserved]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    setattr(call, MARK, True)
    return call


def number_for(value: Tensor, shape: Sequence[int], dtype: torch.dtype) -> float | None:
    """The number of a tensor that may stand in its place next to a tensor of this shape and type; None: there is none.

    NaN stays a tensor: programs are compared, and it equals nothing.
    """
    if value.numel() != 1 or value.dim() > len(shape) or value.dtype is not dtype or not dtype.is_floating_point:
        return None
    number = float(value)
    return None if math.isnan(number) else number


def operand_for(value: HostValue, other: Tensor, dtype: torch.dtype | None = None) -> Any:
    """A host value as an operand next to a tensor: a number where that keeps the tensor's shape, else a tensor.

    Args:
        value: a number or nested tuples of numbers.
        other: the tensor it meets.
        dtype: the value's element type; None: that of `other`.
    """
    rank, number = 0, value
    while isinstance(number, tuple) and len(number) == 1:
        rank, number = rank + 1, number[0]
    if not isinstance(number, tuple) and rank <= other.ndim:
        return number
    return to_tensor(value, dtype or other.dtype, other.device)


def align(A: Tensor, B: Tensor, axis: int | None, broadcast: int) -> Tensor:
    """B in a shape that broadcasts to A by the rule before opset 7.

    B's axes stand for the axes of A from `axis` on; without `axis` for A's last ones. Source: the text of Add-6.

    Raises:
        ValueError: `broadcast` is 0 and the shapes differ, or B has axes beyond A's last.
    """
    if not broadcast:
        if A.shape != B.shape:
            raise ValueError(f"shapes {list(A.shape)} and {list(B.shape)} differ, and broadcast is 0.")
        return B
    if axis is None or B.numel() == 1:
        return B
    start = axis + A.ndim if axis < 0 else axis
    trailing = A.ndim - start - B.ndim
    if trailing < 0:
        raise ValueError(f"B {list(B.shape)} placed at axis {axis} does not fit into A {list(A.shape)}.")
    return B.reshape(B.shape + (1,) * trailing)


def broadcasts_by_attribute(function: Callable[[Tensor, Tensor], Any]) -> Callable[..., Any]:
    """The form that a binary operator had before opset 7, of the form it has since."""

    def call(A: Tensor, B: Tensor, *, axis: int | None = None, broadcast: int = 0) -> Any:
        return function(A, align(A, B, axis, broadcast))

    return call


def by_attributes(function: Callable[..., Any], **attributes: Any) -> Callable[..., Any]:
    """The form that an operator of one input had when its further inputs were attributes: these names, with defaults.

    A default of `REQUIRED` says that the attribute must be given.
    """

    def call(data: Any, **given: Any) -> Any:
        return function(data, **given)

    first = next(iter(inspect.signature(function).parameters.values()))
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, keyword, default=default) for name, default in attributes.items()]
    call.__signature__ = inspect.Signature([first, *parameters])  # type: ignore[attr-defined]
    return call
