"""Cross entropy over classes of several ranks: a label outside of them is named."""

from __future__ import annotations

import pytest
import torch

from onward.parallel.horizontal.loss import sharded_cross_entropy


def test_a_label_outside_of_the_classes_is_named() -> None:
    with pytest.raises(ValueError, match=r"label 7 is out of range for 7 classes \(0 to 6\); 1 of 3 labels are"):
        sharded_cross_entropy(
            torch.zeros(3, 3),
            torch.tensor([0, 7, 6]),
            rank=0,
            output_count=1,
            horizontal_group="",
            cut_axis=1,
            blocks=(7,),
            size=2,
        )
