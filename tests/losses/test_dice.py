"""Dice losses are MONAI's formula, of classes and of zeros and ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from onward.errors import ModelError
from onward.graph.losses.file import write_model_with_loss
from onward.graph.losses.spec import LossSpec
from tests.graph.loss_models import Shape, pass_through
from tests.losses.formulas import check

pytestmark = pytest.mark.filterwarnings("ignore:The model has no trainable weights")


def dice(probabilities: torch.Tensor, targets: torch.Tensor, reduction: str, smooth: float = 1e-5) -> torch.Tensor:
    """MONAI's `DiceLoss`: of [batch, channels, ...], an overlap for each sample and channel."""
    axes = tuple(range(2, probabilities.ndim))
    overlap = (probabilities * targets).sum(axes)
    sizes = probabilities.sum(axes) + targets.sum(axes)
    losses = 1 - (2 * overlap + smooth) / (sizes + smooth)
    return losses.mean() if reduction == "mean" else losses.sum()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("class_axis", "ignored"), [(1, None), (-1, 255), (1, 2)])
@pytest.mark.parametrize("opset", [7, 11, 13, 23])
def test_dice_of_classes(opset: int, class_axis: int, ignored: int | None, reduction: str, tmp_path: Path) -> None:
    generator = np.random.default_rng(5)
    sizes = [3, 4, 6, 5] if class_axis == 1 else [3, 6, 5, 4]
    prediction = generator.normal(size=sizes, scale=2).astype(np.float32)
    labels = generator.integers(0, 3, (3, 6, 5))  # class 3 is in no pixel
    if ignored is not None:
        labels[0, :2] = ignored
    spec = LossSpec(
        type="dice", prediction="y", label="t", class_axis=class_axis, ignore_index=ignored, reduction=reduction
    )

    def reference(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        counted = torch.ones_like(t) if ignored is None else (t != ignored)
        hits = F.one_hot(torch.where(counted.bool(), t, 0), 4).movedim(-1, 1)
        p = y.movedim(class_axis, 1).softmax(1)
        return dice(p * counted[:, None], hits * counted[:, None], reduction)

    counts = check(spec, ["batch", *sizes[1:]], opset, prediction, labels, reference, tmp_path)
    kept = np.ones_like(labels, bool) if ignored is None else labels != ignored
    assert counts["counted"] == kept.sum()
    assert counts["correct"] == ((prediction.argmax(class_axis) == labels) & kept).sum()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("opset", [7, 13, 23])
def test_dice_of_zeros_and_ones(opset: int, reduction: str, tmp_path: Path) -> None:
    """Also of a sample that has no 1: its overlap is of nothing with what is predicted."""
    generator = np.random.default_rng(6)
    prediction = generator.normal(size=(3, 1, 5, 4), scale=2).astype(np.float32)
    labels = generator.integers(0, 2, (3, 1, 5, 4)).astype(np.float32)
    labels[1] = 0
    spec = LossSpec(type="binary_dice", prediction="y", label="t", from_logits=True, reduction=reduction)
    check(spec, ["batch", 1, 5, 4], opset, prediction, labels, lambda y, t: dice(y.sigmoid(), t, reduction), tmp_path)


@pytest.mark.parametrize(("kind", "background"), [("dice", False), ("binary_dice", True), ("binary_dice", False)])
def test_dice_of_channels(kind: str, background: bool, tmp_path: Path) -> None:
    """MONAI's `include_background`, and its regions of labels that do not exclude each other: one for each channel."""
    generator = np.random.default_rng(7)
    prediction = generator.normal(size=(3, 4, 5, 2), scale=2).astype(np.float32)
    is_binary, first = kind == "binary_dice", 0 if background else 1
    flags, classes = generator.integers(0, 2, (3, 4, 5, 2)).astype(np.float32), generator.integers(0, 4, (3, 5, 2))
    options: dict[str, Any] = {"from_logits": True, "dice_per_channel": True} if is_binary else {"class_axis": 1}
    spec = LossSpec(type=kind, prediction="y", label="t", dice_background=background, **options)

    def reference(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        p, t = (y.sigmoid(), t) if is_binary else (y.softmax(1), F.one_hot(t, 4).movedim(-1, 1))
        return dice(p[:, first:], t[:, first:], "mean")

    check(spec, ["batch", 4, 5, 2], 18, prediction, flags if is_binary else classes, reference, tmp_path)


@pytest.mark.parametrize(
    ("spec", "shapes", "words"),
    [
        (
            LossSpec(type="dice", prediction="y", label="t"),
            {"y": ["batch", 4]},
            r"'y' is \[batch, 4\]; loss.type 'dice' compares regions.*Set loss.type: softmax_cross_entropy",
        ),
        (
            LossSpec(type="binary_dice", prediction="y", label="t", dice_per_channel=True),
            {"y": ["batch", 4]},
            r"dice_per_channel is true, but 'y' is \[batch, 4\]; expected the batch, the channels and",
        ),
        (
            LossSpec(type="binary_dice", prediction="y", label="t", dice_background=False),
            {"y": ["batch", 4, 5]},
            r"dice_background is false, .* has unknown classes; expected 2 or more.* set loss.dice_per_channel",
        ),
    ],
)
def test_what_does_not_fit_is_refused(spec: LossSpec, shapes: dict[str, Shape], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        write_model_with_loss(pass_through(18, shapes), spec, tmp_path / "m.onnx")
