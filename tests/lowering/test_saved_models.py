"""What ONNX Runtime saves and runs, onward runs, trains and exports: every form of quantization at every level."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import onward
from onward.errors import OperatorError
from onward.lowering.module import OnnxModule
from tests.lowering.saved_models import FORMS, LEVELS, NETWORKS, Saved, run_as_saved, saved_by_onnxruntime

CASES = [
    pytest.param(network, form, level, marks=[pytest.mark.slow] if level in ("none", "basic") else [])
    for network in NETWORKS
    for form in FORMS
    for level in LEVELS
]


def _skip_blocked_layout(model: onnx.ModelProto) -> None:
    """With ORT_ENABLE_ALL some processors get convolutions of their own: refused, by its own test."""
    if any(node.domain == "com.microsoft.nchwc" for node in model.graph.node):
        with pytest.raises(OperatorError, match="save it with ORT_ENABLE_EXTENDED"):
            onward.to_torch(model)
        pytest.skip("onnxruntime saved the blocked layout of this processor, which is refused with the way out")


@pytest.mark.parametrize(("network", "form", "level"), CASES)
def test_what_onnxruntime_saves_trains(network: str, form: str, level: str, tmp_path: Path) -> None:
    """Outputs to 1e-6 of the largest (fp16: 1e-3); weights there are get a gradient; the file is exported again."""
    saved = saved_by_onnxruntime(network, form, level)
    _skip_blocked_layout(saved.model)
    net = onward.to_torch(saved.model)
    result = net(saved.data)
    largest = np.abs(saved.expected).max()
    bound = 1e-3 if form == "fp16" else 1e-6
    np.testing.assert_allclose(result.detach(), saved.expected, atol=bound * largest, rtol=0)
    onward.export(net, tmp_path / "same.onnx")
    np.testing.assert_array_equal(run_as_saved(onnx.load(tmp_path / "same.onnx"), saved.data), saved.expected)
    if form in ("float", "fp16", "dynamic"):  # the others store no weight as a float; see tests/graph/dequantization
        _assert_trains(net, saved, tmp_path / "trained.onnx", bound)


def _assert_trains(net: OnnxModule, saved: Saved, path: Path, bound: float) -> None:
    """A few updates lower a loss, every weight gets a gradient, and the exported file computes what the net does."""
    with torch.no_grad():
        before = net(saved.data)
    target = before + torch.randn(before.shape, generator=torch.Generator().manual_seed(0)) * before.abs().mean()
    net.keep_fp32_master_weights()
    optimizer = torch.optim.Adam(net.weights.values(), lr=1e-3)
    losses = []
    for _ in range(5):
        loss = (net(saved.data) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        assert all(w.grad is not None and torch.isfinite(w.grad).all() for w in net.weights.values())
        optimizer.step()
    assert losses[-1] < losses[0]
    onward.export(net, path)
    with torch.no_grad():
        after = net(saved.data)
    actual = run_as_saved(onnx.load(path), saved.data)
    np.testing.assert_allclose(after, actual, atol=bound * np.abs(actual).max(), rtol=0)
