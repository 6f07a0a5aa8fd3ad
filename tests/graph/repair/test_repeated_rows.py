"""Rows that an exporter repeated for its batch: one row trains, others stay apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import onward
from onward.graph.inspection.facts import inspect
from onward.graph.inspection.text import render
from onward.graph.nodes.rearrangement import Rearrangement
from onward.graph.repair.split_weights import Tie
from onward.graph.training_graph import make_training_graph
from tests.graph.exported import export
from tests.one_node import run_onnxruntime


class Prompted(nn.Module):
    """A learned token put before each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.out = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1))


def test_a_parameter_that_is_left_only_as_its_repetitions_trains_as_one_row(tmp_path: Path) -> None:
    """The rows of two samples would each get their own gradient, and the token of a trained model depend on the row."""
    torch.manual_seed(0)
    module, x = Prompted(), torch.randn(2, 3, 4)
    path = export(module, (x,), tmp_path / "m.onnx", 18, True)
    net = onward.to_torch(path)
    assert net.graph.ties == {"expand": Tie("expand", Rearrangement((0, 1, 2), (2, 1, 4)))}
    assert any(note.startswith("'expand' is 'token' repeated for each of 2 samples") for note in net.graph.notes)
    assert "expand  = its first row repeated" in render(inspect(path))
    token = net.weights["expand"]
    torch.testing.assert_close(token, module.token)

    optimizers = [torch.optim.SGD(parameters, lr=0.1) for parameters in (net.weights.values(), module.parameters())]
    for _ in range(2):
        for one, optimizer in zip((net, module), optimizers, strict=True):
            optimizer.zero_grad()
            (one(x) * torch.arange(32.0).reshape(2, 4, 4)).square().mean().sqrt().backward()
            optimizer.step()
    torch.testing.assert_close(token.grad, module.token.grad, rtol=1e-5, atol=1e-6)
    onward.export(net, tmp_path / "trained.onnx")
    trained = onnx.load(tmp_path / "trained.onnx")
    (stored,) = [numpy_helper.to_array(one) for one in trained.graph.initializer if one.name == "expand"]
    np.testing.assert_allclose(stored, module.token.detach().expand(2, 1, 4), rtol=1e-6)
    np.testing.assert_allclose(run_onnxruntime(trained, x)[0], module(x).detach(), rtol=1e-5, atol=1e-6)


class Experts(nn.Module):
    """Copies of one expert, which are to become different, repeated along another axis."""

    def __init__(self, repeats: int) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.randn(1, 4).repeat(2, 1))
        self.out = nn.Linear(4, 4)
        self.repeats = repeats

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x * self.matrices[:, None, :].expand(-1, self.repeats, -1))


@pytest.mark.parametrize("batch", [2, 3])
def test_rows_that_are_equal_otherwise_stay_apart(tmp_path: Path, batch: int) -> None:
    """Rows that repeat along another axis too, and rows that are not as many as samples."""
    rows = Experts(3) if batch == 2 else Prompted()
    path = export(rows, (torch.randn(2, 3, 4),), tmp_path / "m.onnx", 18, True)
    model = onnx.load(path)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = batch
    graph = make_training_graph(model)
    assert not graph.ties
    (name,) = [name for name in graph.weights if name.startswith("expand")]
    source = "matrices" if batch == 2 else "token"
    assert (
        f"'{source} ({name})' was computed at export from {source!r}; it trains as a separate weight, and each "
        "of its 2 equal rows separately; a dynamic batch axis at export keeps one."
    ) in graph.notes
