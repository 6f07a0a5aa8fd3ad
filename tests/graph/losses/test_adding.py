"""Every loss, at old and new opsets, is torch's own number when ONNX Runtime computes it, and torch's own gradient."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from onward.graph.losses.file import write_model_with_loss
from onward.graph.losses.spec import LossSpec
from tests.graph.loss_models import OPSETS, RNG, Shape, assert_close, drawn_logits, pass_through, run_loss

ELEMENTWISE = {
    "mean_squared_error": F.mse_loss,
    "l1": F.l1_loss,
    "binary_cross_entropy": F.binary_cross_entropy,
    "logits": F.binary_cross_entropy_with_logits,
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("shape", "declared"), [(["batch", 4], True), ([6, 4], True), (["batch", 4], False)])
@pytest.mark.parametrize("kind", list(ELEMENTWISE))
@pytest.mark.parametrize("opset", OPSETS)
def test_elementwise_losses(opset: int, kind: str, shape: Shape, declared: bool, reduction: str, tmp_path: Path):
    """Squared and absolute error and both binary cross entropies; probabilities of exactly 0 and 1 included."""
    prediction = drawn_logits(6, 4)
    labels = RNG.uniform(size=(6, 4)).astype(np.float32)
    if kind == "binary_cross_entropy":
        prediction = 1 / (1 + np.exp(-prediction))
        prediction[0, :2], labels[0, :2] = (0.0, 1.0), (0.75, 0.0)
    if kind == "logits":
        prediction[0] = [0.0, 90.0, -90.0, 30.0]
    spec = LossSpec(
        type="binary_cross_entropy" if kind == "logits" else kind,
        prediction="out", label="target", reduction=reduction, from_logits=kind == "logits",
    )  # fmt: skip
    model = pass_through(opset, {"out": shape}, declare_shapes=declared)
    outputs, _ = run_loss(model, spec, {"out_in": prediction, "target": labels}, tmp_path)
    reference = ELEMENTWISE[kind](torch.from_numpy(prediction), torch.from_numpy(labels), reduction=reduction)
    assert_close(outputs["loss"], reference)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("kind", ["sparse", "dense", "mse", "l1", "bce", "bce_logits"])
def test_gradients_are_those_of_torch(opset: int, kind: str, tmp_path: Path):
    """Through onward.to_torch, the gradient of each loss in its prediction, at saturated points too."""
    from onward import to_torch

    prediction = torch.from_numpy(drawn_logits(4, 5))
    prediction[0, :2] = 0.0
    labels = torch.from_numpy(RNG.uniform(size=(4, 5)).astype(np.float32))
    if kind == "bce":
        prediction = prediction.sigmoid()
    if kind == "dense":
        labels = labels / labels.sum(1, keepdim=True)
    if kind == "sparse":
        labels = torch.tensor([0, 4, 2, 2])
    spec, reference = {
        "sparse": (LossSpec(type="softmax_cross_entropy", prediction="y", label="t"), F.cross_entropy),
        "dense": (
            LossSpec(type="softmax_cross_entropy", prediction="y", label="t", dense_labels=True),
            F.cross_entropy,
        ),
        "mse": (LossSpec(type="mean_squared_error", prediction="y", label="t"), F.mse_loss),
        "l1": (LossSpec(type="l1", prediction="y", label="t"), F.l1_loss),
        "bce": (LossSpec(type="binary_cross_entropy", prediction="y", label="t"), F.binary_cross_entropy),
        "bce_logits": (
            LossSpec(type="binary_cross_entropy", prediction="y", label="t", from_logits=True),
            F.binary_cross_entropy_with_logits,
        ),
    }[kind]
    write_model_with_loss(pass_through(opset, {"y": ["N", 5]}), spec, tmp_path / "m.onnx")
    net = to_torch(tmp_path / "m.onnx")
    ours, theirs = prediction.clone().requires_grad_(), prediction.clone().requires_grad_()
    net(ours, labels)[1].backward()
    reference(theirs, labels).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)
