"""What operators refuse when they run, in words that name the node; cases that no other test of an operator has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onward.errors import NodeError
from tests.one_node import make_model, run

X = np.zeros((2, 4), np.float32)
IMAGE = np.zeros((1, 4, 6, 6), np.float32)
ROIS = {"rois": np.zeros((1, 4), np.float32), "batch": np.zeros(1, np.int64)}
NUMBERS = {"s": np.array([0]), "e": np.array([1, 2]), "a": np.array([0]), "t": np.array([1])}

Case = tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], int, str]
CASES: dict[str, Case] = {
    "rank of a weight": (
        "Conv", {"x": IMAGE, "w": np.zeros((2, 4, 3), np.float32)}, {}, {}, 20,
        r"X has shape \[1, 4, 6, 6\] and W \[2, 4, 3\]; both need the same rank, at least 3",
    ),
    "scores": (
        "SoftmaxCrossEntropyLoss", {"x": np.zeros(4, np.float32), "y": np.zeros(4, np.int64)}, {}, {}, 13,
        r"scores are \[4\]; expected \[N, C\] or \[N, C, d1",
    ),
    "bounds of a slice": (
        "Slice", {"x": X}, {}, NUMBERS, 20, "1 starts, 2 ends, 1 axes and 1 steps do not match",
    ),
    "blocks": (
        "SpaceToDepth", {"x": IMAGE}, {"blocksize": 4}, {}, 20, r"space \[6, 6\] is not divisible by blocksize 4",
    ),
    "pads": (
        "Pad", {"x": X}, {}, {"pads": np.array([1, 1])}, 13,
        "2 pads for 2 axes; a begin and an end for each is needed",
    ),
    "flat pooling": (
        "MaxPool", {"x": X}, {"kernel_shape": [2]}, {}, 20, r"X has shape \[2, 4\]; pooling takes \(batch, channels",
    ),
    "frames": (
        "STFT", {"x": np.zeros((1, 16, 1), np.float32)}, {},
        {"step": np.array(4), "window": np.ones(8, np.float32), "length": np.array(6)}, 20,
        "frame_length is 6, but the window has 8 values",
    ),
    "sampling": (
        "GridSample", {"x": IMAGE, "grid": np.zeros((1, 2, 2, 2), np.float32)}, {"mode": "lanczos"}, {}, 20,
        "mode is 'lanczos' and padding_mode 'zeros'; expected linear, nearest or cubic",
    ),
    "regions": (
        "RoiAlign", {"x": IMAGE, **ROIS}, {"mode": "median"}, {}, 16, "mode is 'median'; expected 'avg' or 'max'",
    ),
    "direction": (
        "RNN",
        {"x": np.zeros((3, 1, 2), np.float32), "w": np.zeros((1, 5, 2), np.float32),
         "r": np.zeros((1, 5, 5), np.float32)},
        {"hidden_size": 5, "direction": "sideways"}, {}, 14,
        "direction is 'sideways'; expected forward, reverse or bidirectional",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_misfit_is_named_with_its_node(case: str) -> None:
    op_type, inputs, attributes, stored, opset, words = CASES[case]
    model = make_model(op_type, inputs, attributes, opset, initializers=stored)
    with pytest.raises(NodeError, match=rf"node 'node' \({op_type}\).*{words}"):
        run(model, *inputs.values())
