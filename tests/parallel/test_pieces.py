"""Pieces: boxes that lie inside of their tensors, and only those."""

from __future__ import annotations

import pytest
import torch

from onward.parallel.pieces import Piece
from onward.plan.shards import Box


@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0, 3)])
def test_a_whole_tensor_is_one_box(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape)
    piece = Piece.whole(tensor)
    zeros = (0,) * len(shape)
    assert piece.tensor is tensor
    assert piece.whole_shape == shape
    assert piece.boxes == (Box(zeros, shape, zeros),)
    assert piece.num_elements == tensor.numel()
    assert piece.is_written
    assert not Piece.whole(tensor, is_written=False).is_written


@pytest.mark.parametrize(
    ("box", "words"),
    [
        (Box((3, 0), (2, 5), (0, 0)), r"is not inside a tensor of shape \[4, 5\]"),
        (Box((0, 0), (2, 5), (1, 0)), r"is not inside a rank's tensor of shape \[2, 5\]"),
        (Box((0,), (2,), (0,)), r"is not inside a tensor of shape \[4, 5\]"),
        (Box((-1, 0), (1, 5), (0, 0)), r"is not inside a tensor of shape \[4, 5\]"),
    ],
)
def test_a_box_outside_is_refused(box: Box, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Piece(torch.zeros(2, 5), (4, 5), (box,))
