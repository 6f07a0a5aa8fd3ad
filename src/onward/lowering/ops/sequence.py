"""Sequences and optionals. A sequence is a Python list that no operator changes in place; an empty optional is None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onward.lowering.kernels.host import HostValue
from onward.lowering.kernels.host import flatten as numbers_of
from onward.lowering.registry import lowers

Sequence = list[Tensor]


@lowers("SequenceEmpty", since=11)
def sequence_empty(*, dtype: int = 1) -> Sequence:
    """https://onnx.ai/onnx/operators/onnx__SequenceEmpty.html"""
    return []


@lowers("SequenceConstruct", since=11)
def sequence_construct(*inputs: Tensor) -> Sequence:
    """https://onnx.ai/onnx/operators/onnx__SequenceConstruct.html"""
    return list(inputs)


@lowers("SequenceAt", since=11, host=("position",))
def sequence_at(input_sequence: Sequence, position: HostValue) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__SequenceAt.html; negative positions count from the end."""
    return input_sequence[_checked(numbers_of(position)[0], len(input_sequence))]


@lowers("SequenceInsert", since=11, host=("position",))
def sequence_insert(input_sequence: Sequence, tensor: Tensor, position: HostValue | None = None) -> Sequence:
    """https://onnx.ai/onnx/operators/onnx__SequenceInsert.html; before `position`, at the end by default."""
    length = len(input_sequence)
    at = length if position is None else numbers_of(position)[0]
    if not -length <= at <= length:
        raise ValueError(f"position {at} is out of range for a sequence of {length}.")
    at = at + length if at < 0 else at
    return [*input_sequence[:at], tensor, *input_sequence[at:]]


@lowers("SequenceErase", since=11, host=("position",))
def sequence_erase(input_sequence: Sequence, position: HostValue | None = None) -> Sequence:
    """https://onnx.ai/onnx/operators/onnx__SequenceErase.html; the last element by default."""
    length = len(input_sequence)
    at = _checked(-1 if position is None else numbers_of(position)[0], length)
    return [*input_sequence[:at], *input_sequence[at + 1 :]]


def _checked(position: int, length: int) -> int:
    if not -length <= position < length:
        raise ValueError(f"position {position} is out of range for a sequence of {length}.")
    return position + length if position < 0 else position


@lowers("SequenceLength", since=11, produces="host")
def sequence_length(input_sequence: Sequence) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__SequenceLength.html"""
    return len(input_sequence)


@lowers("ConcatFromSequence", since=11)
def concat_from_sequence(input_sequence: Sequence, *, axis: int, new_axis: int = 0) -> Tensor:
    """https://onnx.ai/onnx/operators/onnx__ConcatFromSequence.html; stacks them with `new_axis`."""
    return torch.stack(input_sequence, axis) if new_axis else torch.cat(input_sequence, axis)


@lowers("SplitToSequence", since=11, host=("split",))
def split_to_sequence(input: Tensor, split: HostValue | None = None, *, axis: int = 0, keepdims: int = 1) -> Sequence:
    """https://onnx.ai/onnx/operators/onnx__SplitToSequence.html; parts of size 1 without `split`."""
    if split is None:
        return list(torch.split(input, 1, axis) if keepdims else input.unbind(axis))
    return list(torch.split(input, list(split) if isinstance(split, tuple) else int(split), axis))


@lowers("SequenceMap", since=17)
def sequence_map(
    input_sequence: Sequence,
    *additional_inputs: Sequence | Tensor,
    body: Callable[..., tuple[Any, ...]],
    output_count: int,
) -> tuple[Sequence, ...]:
    """https://onnx.ai/onnx/operators/onnx__SequenceMap.html; tensors among the inputs go to every call."""
    rows = []
    for place, element in enumerate(input_sequence):
        others = [value[place] if isinstance(value, list) else value for value in additional_inputs]
        rows.append(body(element, *others))
    if not rows:
        return tuple([] for _ in range(output_count))
    return tuple(list(column) for column in zip(*rows, strict=True))


@lowers("Optional", since=15)
def optional(input: Any = None, *, type: Any = None) -> Any:
    """https://onnx.ai/onnx/operators/onnx__Optional.html; None without an input."""
    return input


@lowers("OptionalHasElement", since=15, produces="host", result_dtype="bool")
def optional_has_element(input: Any = None) -> HostValue:
    """https://onnx.ai/onnx/operators/onnx__OptionalHasElement.html"""
    return input is not None


@lowers("OptionalGetElement", since=15)
def optional_get_element(input: Any) -> Any:
    """https://onnx.ai/onnx/operators/onnx__OptionalGetElement.html"""
    if input is None:
        raise ValueError("the optional is empty; test it with OptionalHasElement first.")
    return input
