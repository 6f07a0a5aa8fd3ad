"""Binary cross entropy at saturated probabilities."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onward.graph.losses.file import write_model_with_loss
from onward.graph.losses.spec import LossSpec
from tests.graph.loss_models import pass_through


def test_a_saturated_probability_gives_no_nan(tmp_path: Path):
    """sigmoid(200) is exactly 1: torch's loss of 100, and a finite gradient in the logit."""
    from onward import to_torch

    write_model_with_loss(
        pass_through(13, {"y": ["N"]}),
        LossSpec(type="binary_cross_entropy", prediction="y", label="t"),
        tmp_path / "m.onnx",
    )
    net = to_torch(tmp_path / "m.onnx")
    logit = torch.tensor([200.0, -200.0], requires_grad=True)
    loss = net(logit.sigmoid(), torch.tensor([0.0, 1.0]))[1]
    loss.backward()
    assert loss.item() == pytest.approx(100.0)
    assert torch.equal(logit.grad, torch.zeros(2))
