"""The check of a loss against the formula it is published with: its number in ONNX Runtime, its gradient in onward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from onward import to_torch
from onward.graph.losses.spec import LossSpec
from tests.graph.loss_models import Shape, pass_through, run_loss

RELATIVE = 1e-6
Reference = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def check(
    spec: LossSpec, shape: Shape, opset: int, prediction: np.ndarray, labels: np.ndarray, reference: Reference, at: Path
) -> dict[str, np.ndarray]:
    """The loss in ONNX Runtime to 1e-6, its gradient by onward to 1e-5; the reference computes in float64."""
    model = pass_through(opset, {"y": shape})
    outputs, names = run_loss(model, spec, {"y_in": prediction, "t": labels}, at)
    exact = torch.from_numpy(prediction).double().requires_grad_()
    expected = reference(exact, torch.from_numpy(labels))
    expected.backward()
    assert outputs["loss"] == pytest.approx(expected.item(), rel=RELATIVE)
    net, given = to_torch(at / "with_loss.onnx"), torch.from_numpy(prediction).requires_grad_()
    results = dict(zip(("y", *(n for n in outputs if n != "y")), net(given, torch.from_numpy(labels)), strict=True))
    results["loss"].backward()
    assert results["loss"].item() == pytest.approx(expected.item(), rel=RELATIVE)
    assert exact.grad is not None
    torch.testing.assert_close(given.grad, exact.grad.float(), rtol=1e-5, atol=1e-8)
    counts = {"correct": names.correct, "counted": names.counted}
    return {kind: outputs[name] for kind, name in counts.items() if name is not None}
