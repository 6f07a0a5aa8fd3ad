"""Operands of elementwise operators: numbers stay numbers where shapes allow, and the broadcasting before opset 7."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

from onward.lowering.kernels.operands import (
    REQUIRED,
    align,
    broadcasts_by_attribute,
    by_attributes,
    operand_for,
    takes_numbers,
)
from tests.one_node import make_model, run


def subtract(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """A - B."""
    return A - B


def torch_sum(x: torch.Tensor, axes: tuple[int, ...], keepdims: bool) -> torch.Tensor:
    """Sum over axes."""
    return x.sum(axes, keepdim=keepdims)


def test_a_number_keeps_the_tensors_shape_or_becomes_a_tensor() -> None:
    x = torch.zeros(2)
    assert operand_for(3, x) == 3
    assert operand_for((3,), x) == 3
    grown = operand_for(((3,),), x)  # of a higher rank than x: the result has it too
    assert isinstance(grown, torch.Tensor)
    assert grown.shape == (1, 1)
    assert operand_for((1, 2), x, torch.int64).dtype is torch.int64


def test_either_operand_may_be_known_in_python() -> None:
    call, x = takes_numbers(subtract), torch.tensor([1.0, 2.0])
    assert call(x, 1).tolist() == [0.0, 1.0]
    assert call((1, 1), x).tolist() == [0.0, -1.0]
    assert call((1, 2), 1, dtypes=(torch.int32, None)).dtype is torch.int32
    assert list(inspect.signature(call).parameters) == ["A", "B", "device", "dtypes"]


A = torch.zeros(2, 3, 4, 5)


@pytest.mark.parametrize(
    ("shape", "axis", "expected"),
    [
        ((), None, (2, 3, 4, 5)),
        ((5,), None, (2, 3, 4, 5)),
        ((4, 5), None, (2, 3, 4, 5)),
        ((3, 4), 1, (2, 3, 4, 5)),
        ((2,), 0, (2, 3, 4, 5)),
        ((3,), -3, (2, 3, 4, 5)),
    ],
)
def test_axes_of_b_stand_for_axes_of_a(shape: tuple[int, ...], axis: int | None, expected: tuple[int, ...]) -> None:
    """The examples in the text of Add-6."""
    assert (A + align(A, torch.ones(shape), axis, 1)).shape == expected


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"shapes \[2, 3, 4, 5\] and \[5\] differ, and broadcast is 0"):
        align(A, torch.ones(5), None, 0)
    with pytest.raises(ValueError, match=r"B \[4, 5\] placed at axis 3 does not fit into A \[2, 3, 4, 5\]"):
        align(A, torch.ones(4, 5), 3, 1)


def test_older_forms_take_the_attributes_of_their_time() -> None:
    before_7 = broadcasts_by_attribute(subtract)
    assert before_7(torch.ones(2, 3), torch.ones(2), axis=0, broadcast=1).tolist() == [[0.0] * 3] * 2
    assert list(inspect.signature(before_7).parameters) == ["A", "B", "axis", "broadcast"]
    before_13 = by_attributes(torch_sum, axes=None, keepdims=REQUIRED)
    assert before_13(torch.ones(2, 3), axes=(1,), keepdims=False).tolist() == [3.0, 3.0]
    parameters = inspect.signature(before_13).parameters
    assert {name: one.default for name, one in parameters.items()} == {
        "x": REQUIRED,
        "axes": None,
        "keepdims": REQUIRED,
    }


def test_a_hint_which_inputs_may_be_overwritten_changes_nothing() -> None:
    x = np.array([-1.0, 2.0], np.float32)
    model = make_model("Relu", {"x": x}, {"consumed_inputs": [0]}, opset=5)
    assert run(model, x).tolist() == [0.0, 2.0]
