"""A recurrent net's first step, folded by the exporter into a bias for each sample, trains with that bias again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import torch
from torch import nn

import onward
from onward.graph.inspection.facts import inspect
from onward.graph.inspection.text import render
from onward.graph.nodes.rearrangement import Rearrangement
from onward.graph.repair.split_weights import Tie
from onward.graph.training_graph import make_training_graph
from tests.graph.exported import export
from tests.one_node import run_onnxruntime


class Cells(nn.Module):
    """Three steps of a cell, written out, from zeros for as many samples as there are at export."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(x.shape[0], 4)
        for step in x.unbind(1):
            h = self.cell(step, h)
        return self.out(h)


def test_a_folded_first_step_trains_like_the_module_and_is_exported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = Cells(), torch.randn(2, 3, 3)
    path = export(module, (x,), tmp_path / "m.onnx", 18, True)
    net = onward.to_torch(path)
    assert set(net.weights) == {name for name, _ in module.named_parameters()}
    ((copy, tie),) = net.graph.ties.items()
    size = module.cell.bias_hh.shape[0]
    assert tie == Tie("cell.bias_hh", Rearrangement((0,), (2, size)))
    assert f"{copy!r} is 'cell.bias_hh' repeated to the shape [2, {size}]" in net.graph.notes[0]
    assert "= cell.bias_hh repeated" in render(inspect(path))

    optimizers = [torch.optim.SGD(parameters, lr=0.1) for parameters in (net.weights.values(), module.parameters())]
    for one, optimizer in zip((net, module), optimizers, strict=True):
        one(x).square().sum().backward()
        optimizer.step()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(net.weights[name].grad, parameter.grad, rtol=1e-5, atol=1e-6)
    onward.export(net, tmp_path / "trained.onnx")
    trained = onnx.load(tmp_path / "trained.onnx")
    assert {tensor.name for tensor in trained.graph.initializer} >= {"cell.bias_hh", copy}
    np.testing.assert_allclose(run_onnxruntime(trained, x)[0], module(x).detach(), rtol=1e-5, atol=1e-6)


def test_equal_numbers_alone_tie_nothing() -> None:
    """Without the exporter's note of where it comes from, and of numbers that are all the same, a tensor stays."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[2, 3] x) => (float[2, 3] y)
        <float[3] b = {1, 2, 3}, float[2, 3] r = {1, 2, 3, 1, 2, 3}, float[3] o = {1, 1, 1},
         float[2, 3] p = {1, 1, 1, 1, 1, 1}> { s = Add(x, b) t = Add(s, r) u = Mul(t, o) y = Mul(u, p) }"""
    )
    assert not make_training_graph(model).ties
    for name, sources in (("r", "['b', 'w']"), ("p", "['o', 'w']")):
        value = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 3])
        value.metadata_props.add(key="pkg.onnxscript.optimizer.folded_from", value=sources)
        model.graph.value_info.append(value)
    assert make_training_graph(model).ties == {"r": Tie("b", Rearrangement((0,), (2, 3)))}
