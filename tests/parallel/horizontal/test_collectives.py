"""Collectives of tensor parallelism: without a group nothing is exchanged."""

from __future__ import annotations

import pytest
import torch

from onward.parallel.horizontal.operators import (
    sharded_softmax,
)


def test_without_a_group_nothing_is_exchanged() -> None:
    with pytest.raises(
        RuntimeError, match="lowered without a process group; give its ExecutionContext the group's name"
    ):
        sharded_softmax(torch.zeros(3, 3), rank=0, horizontal_group="", cut_axis=1, blocks=(7,), size=2)
