"""Parameters that torch's exporter took for constants train."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import onward
from tests.graph.exported import export
from tests.one_node import run_onnxruntime


class Wired(nn.Module):
    """A cell whose parameters, kept in a dict, are used elementwise only, as liquid time-constant networks do."""

    def __init__(self, units: int, registered: bool) -> None:
        super().__init__()
        self.table: dict[str, nn.Parameter] = {}
        shapes = {"w": (units, units), "mu": (units, units), "leak": (units,), "inputs": (3, units), "cm": (units,)}
        for name, shape in shapes.items():
            self.table[name] = nn.Parameter(torch.rand(shape) + 0.5)
            if registered:
                self.register_parameter(name, self.table[name])
        mask = (torch.rand(units, units) > 0.5).float()
        self.table["mask"] = nn.Parameter(mask, requires_grad=False)

    def forward(self, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        p = self.table
        for t in x.unbind(1):
            drive = (t[:, :, None] * p["inputs"]).sum(1)
            inner = (torch.sigmoid(v[:, :, None] - p["mu"]) * p["w"] * p["mask"]).sum(1)
            v = (p["cm"] * v + drive + inner) / (1 + p["leak"])
        return v


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("units", [5, 40])
def test_parameters_that_the_exporter_took_for_constants_train(units: int, registered: bool, tmp_path: Path) -> None:
    """Also where each use of one has a copy of its own (1,600 elements)."""
    torch.manual_seed(0)
    module, inputs = Wired(units, registered), (torch.randn(2, 2, 3), torch.randn(2, units))
    net = onward.to_torch(export(module, inputs, tmp_path / "m.onnx", 18, True))
    trained = {name: one for name, one in module.table.items() if name != "mask"}
    assert sorted(tuple(w.shape) for w in net.weights.values()) == sorted(tuple(p.shape) for p in trained.values())
    assert "a mask" in net.graph.frozen.values()
    assert any("lost their names at export" in note and "ParameterDict" in note for note in net.graph.notes)
    both = (list(net.weights.values()), list(trained.values()))
    optimizers = [torch.optim.SGD(parameters, lr=0.1) for parameters in both]
    for _ in range(3):
        for one, optimizer in zip((net, module), optimizers, strict=True):
            optimizer.zero_grad()
            one(*inputs).square().mean().backward()
            optimizer.step()
    onward.export(net, tmp_path / "t.onnx")
    other = (torch.randn(2, 2, 3), torch.randn(2, units))
    found = run_onnxruntime(onnx.load(tmp_path / "t.onnx"), *other)[0]
    np.testing.assert_allclose(found, module(*other).detach(), rtol=1e-4, atol=1e-5)
