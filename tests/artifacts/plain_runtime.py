"""Runs training graphs with stock onnxruntime, the way a program that has nothing else would."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from onward.lowering.module import OnnxModule


def open_session(path: Path) -> onnxruntime.InferenceSession:
    """A session on one thread; without the warning that weights which are inputs are not folded."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def call(session: onnxruntime.InferenceSession, feeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All outputs by name."""
    arrays = session.run(None, {name: tensor.detach().numpy() for name, tensor in feeds.items()})
    return {
        output.name: torch.from_numpy(np.asarray(array))
        for output, array in zip(session.get_outputs(), arrays, strict=True)
    }


def largest_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest number expected of the same tensor."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert bool(actual.isfinite().all())
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def autograd_gradients(net: OnnxModule, features: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The loss, gradients and running statistics of one pass of the network, under the names of a training graph."""
    net.zero_grad()
    loss = net(**features)
    loss.backward()
    found = {"loss": loss.detach()}
    for name, weight in net.weights.items():
        assert weight.grad is not None
        found[f"{name}_grad"] = weight.grad
    tensors = net.tensors_by_name()
    return found | {f"{name}_new": tensors[name].clone() for name in net.graph.states}
