"""Operands of elementwise operators: tensors, or Python numbers where the program knows them, and how they broadcast.

A number needs no memory and no launch of its own, so an operator takes it as it is wherever the result keeps the
other operand's shape.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onward.lowering.kernels.host import HostValue, to_tensor


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
            return function(A, B if isinstance(B, Tensor) else beside(B, A, dtypes[1]), **keywords)
        if isinstance(B, Tensor):
            return function(beside(A, B, dtypes[0]), B, **keywords)
        assert dtypes[0] is not None
        A = to_tensor(A, dtypes[0], device)
        return function(A, beside(B, A, dtypes[1]), **keywords)

    keyword = inspect.Parameter.KEYWORD_ONLY
    reserved = [inspect.Parameter(name, keyword) for name in ("device", "dtypes")]
    parameters = [*inspect.signature(function).parameters.values(), *reserved]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def beside(value: HostValue, other: Tensor, dtype: torch.dtype | None = None) -> Any:
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


def broadcasts_by_attribute(function: Callable[..., Any], consumes: bool) -> Callable[..., Any]:
    """The form that a binary operator had before opset 7, of the form it has since.

    `consumes`: the operator once had the attribute `consumed_inputs`, a hint without meaning.
    """
    first, second = list(inspect.signature(function).parameters.values())[:2]

    def call(
        A: Tensor,
        B: Tensor,
        *,
        axis: int | None = None,
        broadcast: int = 0,
        consumed_inputs: tuple[int, ...] = (),
    ) -> Any:
        return function(A, align(A, B, axis, broadcast))

    keyword = inspect.Parameter.KEYWORD_ONLY
    attributes = [inspect.Parameter("axis", keyword, default=None), inspect.Parameter("broadcast", keyword, default=0)]
    if consumes:
        attributes.append(inspect.Parameter("consumed_inputs", keyword, default=()))
    call.__signature__ = inspect.Signature([first, second, *attributes])  # type: ignore[attr-defined]
    return _renamed(call, f"{function.__name__}_before_7", function)


def consumes_inputs(function: Callable[..., Any]) -> Callable[..., Any]:
    """The form that an operator had before opset 6: with the attribute `consumed_inputs`, a hint without meaning."""

    def call(*inputs: Any, consumed_inputs: tuple[int, ...] = (), **keywords: Any) -> Any:
        return function(*inputs, **keywords)

    hint = inspect.Parameter("consumed_inputs", inspect.Parameter.KEYWORD_ONLY, default=())
    parameters = [*inspect.signature(function).parameters.values(), hint]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return _renamed(call, f"{function.__name__}_before_6", function)


def _renamed(function: Callable[..., Any], name: str, origin: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = name
    function.__module__ = origin.__module__
    function.__doc__ = origin.__doc__
    return function
