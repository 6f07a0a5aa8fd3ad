"""The focal loss is torchvision's formula, finite also where a prediction is certain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from onward import to_torch
from onward.graph.losses.file import write_model_with_loss
from onward.graph.losses.spec import LossSpec
from tests.graph.loss_models import OPSETS, pass_through
from tests.losses.formulas import check

pytestmark = pytest.mark.filterwarnings("ignore:The model has no trainable weights")


def focal(
    logits: torch.Tensor, targets: torch.Tensor, alpha: float | None, gamma: float, reduction: str
) -> torch.Tensor:
    """`sigmoid_focal_loss` of torchvision: -alpha_t (1 - p_t)^gamma log(p_t)."""
    targets = targets.to(logits.dtype)
    p = torch.sigmoid(logits)
    p_t = p * targets + (1 - p) * (1 - targets)
    cost = F.binary_cross_entropy_with_logits(logits, targets, reduction="none") * (1 - p_t) ** gamma
    if alpha is not None:
        cost = cost * (alpha * targets + (1 - alpha) * (1 - targets))
    return cost.mean() if reduction == "mean" else cost.sum()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("alpha", "gamma"), [(0.25, 2.0), (None, 2.0), (0.75, 0.5), (0.5, 0.0)])
@pytest.mark.parametrize("opset", OPSETS)
def test_focal_loss(opset: int, alpha: float | None, gamma: float, reduction: str, tmp_path: Path) -> None:
    generator = np.random.default_rng(4)
    prediction = generator.normal(size=(5, 4), scale=3).astype(np.float32)
    labels = generator.integers(0, 2, (5, 4)).astype(np.float32)
    labels[0, 0] = 0.3
    spec = LossSpec(
        type="focal", prediction="y", label="t", from_logits=True, focal_alpha=alpha, focal_gamma=gamma,
        reduction=reduction,
    )  # fmt: skip
    counts = check(
        spec, ["batch", 4], opset, prediction, labels, lambda y, t: focal(y, t, alpha, gamma, reduction), tmp_path
    )
    whole = (labels == 0) | (labels == 1)
    assert counts["counted"] == whole.sum()
    assert counts["correct"] == ((prediction > 0) == (labels == 1))[whole].sum()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("ignored", "weights", "gamma"), [(None, None, 2.0), (255, None, 0.5), (1, (0.5, 1, 2, 4), 2.0)]
)
@pytest.mark.parametrize(("opset", "class_axis"), [(7, -1), (11, 1), (13, -1), (23, 1)])
def test_focal_loss_of_classes(
    opset: int, class_axis: int, ignored: int | None, weights: Any, gamma: float, reduction: str, tmp_path: Path
) -> None:
    """-w (1 - p)^gamma log(p) of each label, whose mean is torch's cross entropy where gamma is 0."""
    generator = np.random.default_rng(4)
    sizes = [3, 4, 5] if class_axis == 1 else [3, 5, 4]
    prediction = generator.normal(size=sizes, scale=2).astype(np.float32)
    labels = generator.integers(0, 4, (3, 5))
    labels[0, :2] = 3 if ignored is None else ignored
    spec = LossSpec(
        type="softmax_focal", prediction="y", label="t", class_axis=class_axis, ignore_index=ignored,
        class_weights=weights, focal_gamma=gamma, reduction=reduction,
    )  # fmt: skip

    def reference(y: torch.Tensor, t: torch.Tensor, gamma: float = gamma) -> torch.Tensor:
        counted = torch.ones_like(t, dtype=torch.bool) if ignored is None else t != ignored
        t = torch.where(counted, t, 0)
        log_p = y.movedim(class_axis, -1).log_softmax(-1).gather(-1, t[..., None])[..., 0]
        share = counted.double() * (1 if weights is None else torch.tensor(weights).double()[t])
        total = -(share * (1 - log_p.exp()) ** gamma * log_p).sum()
        return total / share.sum() if reduction == "mean" else total

    counts = check(spec, ["batch", *sizes[1:]], opset, prediction, labels, reference, tmp_path)
    exact, targets = torch.from_numpy(prediction).double(), torch.from_numpy(labels)
    by_torch = F.cross_entropy(
        exact.movedim(class_axis, 1), targets, ignore_index=-100 if ignored is None else ignored, reduction=reduction,
        weight=None if weights is None else torch.tensor(weights).double(),
    )  # fmt: skip
    assert reference(exact, targets, 0.0).item() == pytest.approx(by_torch.item(), rel=1e-12)
    kept = np.ones_like(labels, bool) if ignored is None else labels != ignored
    assert counts["counted"] == kept.sum()
    assert counts["correct"] == ((prediction.argmax(class_axis) == labels) & kept).sum()


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_a_saturated_focal_loss_has_finite_gradients(gamma: float, tmp_path: Path) -> None:
    """1 - p_t of a certain logit is 0 in float32, and the gradient of its root would be infinite."""
    spec = LossSpec(type="focal", prediction="y", label="t", from_logits=True, focal_gamma=gamma)
    write_model_with_loss(pass_through(18, {"y": ["batch"]}), spec, tmp_path / "m.onnx")
    logits = torch.tensor([300.0, -300.0, 300.0], requires_grad=True)
    to_torch(tmp_path / "m.onnx")(logits, torch.tensor([1.0, 0.0, 0.0]))[1].backward()
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[:2].abs().max() < 1e-6
    assert logits.grad[2] == pytest.approx(0.75 / 3, rel=1e-5)
