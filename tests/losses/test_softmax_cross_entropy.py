"""Softmax cross entropy is torch's: classes on any axis, dense labels, weights, ignored labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from onward.graph.losses.spec import LossSpec
from tests.graph.loss_models import OPSETS, RNG, assert_close, drawn_logits, pass_through, run_loss


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignore_index", [None, -100, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("opset", OPSETS)
def test_sparse_cross_entropy(opset: int, weighted: bool, ignore_index: int | None, reduction: str, tmp_path: Path):
    """Classes last, [batch, sequence, classes], with class weights and ignored labels."""
    logits = drawn_logits(3, 5, 7)
    labels = RNG.integers(0, 7, size=(3, 5))
    if ignore_index is not None:
        labels[0, :3] = ignore_index
    weights = tuple(RNG.uniform(0.2, 2.0, size=7).astype(np.float32).tolist()) if weighted else None
    spec = LossSpec(
        type="softmax_cross_entropy", prediction="logits", label="labels",
        ignore_index=ignore_index, class_weights=weights, reduction=reduction,
    )  # fmt: skip
    outputs, names = run_loss(
        pass_through(opset, {"logits": ["batch", "sequence", 7]}),
        spec,
        {"logits_in": logits, "labels": labels},
        tmp_path,
    )
    reference = F.cross_entropy(
        torch.from_numpy(logits).reshape(-1, 7),
        torch.from_numpy(labels).reshape(-1),
        weight=torch.tensor(weights) if weighted else None,
        ignore_index=-100 if ignore_index is None else ignore_index,
        reduction=reduction,
    )
    assert_close(outputs["loss"], reference)
    kept = np.ones_like(labels, bool) if ignore_index is None else labels != ignore_index
    assert outputs[names.correct] == ((logits.argmax(-1) == labels) & kept).sum()
    assert outputs[names.counted] == kept.sum()


@pytest.mark.parametrize(
    ("sizes", "class_axis"),
    [
        ((4, 6), 1),
        ((4, 6), -1),
        ((6, 4), 0),
        ((2, 6, 3), 1),
        ((2, 6, 3, 4), 1),
        ((2, 3, 6, 4), 2),
        ((6, 2, 3), 0),
        ((6,), 0),
    ],
)
@pytest.mark.parametrize("opset", [7, 12, 13, 23])
@pytest.mark.parametrize("dense", [False, True])
def test_class_axis(opset: int, sizes: tuple[int, ...], class_axis: int, dense: bool, tmp_path: Path):
    """Classes on any axis, sparse and dense labels, all axes fixed."""
    logits = drawn_logits(*sizes)
    rest = [size for axis, size in enumerate(sizes) if axis != class_axis % len(sizes)]
    moved = torch.from_numpy(logits).movedim(class_axis, -1).reshape(-1, 6)
    weights = tuple(RNG.uniform(0.5, 1.5, size=6).astype(np.float32).tolist())
    if dense:
        labels = RNG.dirichlet(np.ones(6), size=rest).astype(np.float32)
        reference = F.cross_entropy(moved, torch.from_numpy(labels).reshape(-1, 6), weight=torch.tensor(weights))
        labels = np.ascontiguousarray(np.moveaxis(labels, -1, class_axis))
    else:
        labels = RNG.integers(0, 6, size=rest)
        reference = F.cross_entropy(moved, torch.from_numpy(labels).reshape(-1), weight=torch.tensor(weights))
    spec = LossSpec(
        type="softmax_cross_entropy",
        prediction="logits",
        label="labels",
        class_axis=class_axis,
        class_weights=weights,
        dense_labels=dense,
    )
    feeds = {"logits_in": logits, "labels": labels}
    outputs, names = run_loss(pass_through(opset, {"logits": sizes}), spec, feeds, tmp_path)
    assert_close(outputs["loss"], reference)
    best = labels.argmax(class_axis) if dense else labels
    assert outputs[names.correct] == (logits.argmax(class_axis) == best).sum()
    assert outputs[names.counted] == best.size
