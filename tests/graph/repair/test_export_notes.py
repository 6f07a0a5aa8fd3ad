"""What an export dropped is reported: batch normalization, biases of zeros."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from onward.graph.training_graph import make_training_graph
from tests.graph.exported import Residual, export
from tests.graph.repair.exported_weights import BOTH, match


@BOTH
def test_batch_norm_folded_away_is_said(dynamo: bool, opset: int, tmp_path: Path):
    module = Residual().eval()
    graph = make_training_graph(export(module, (torch.randn(2, 3, 8, 8),), tmp_path / "m.onnx", opset, dynamo))
    assert graph.states == ()
    (note,) = (note for note in graph.notes if "batch normalization was folded into 3 convolutions" in note)
    assert ("optimize=False" if dynamo else "TrainingMode.TRAINING") in note


class TransposedKernel(nn.Module):
    """A convolution whose kernel is stored in another order, as Keras stores it; no batch normalization anywhere."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(3, 3, 3, 4))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return nn.functional.conv2d(x, self.kernel.permute(3, 2, 0, 1)) + self.bias.reshape(1, 4, 1, 1)


def test_a_kernel_that_was_only_transposed_lost_no_batch_norm(tmp_path: Path):
    example = (torch.randn(2, 3, 8, 8),)
    model = export(TransposedKernel().eval(), example, tmp_path / "m.onnx", 17, False)
    assert any(name.startswith("onnx::Conv_") for name in make_training_graph(model).weights)
    assert not any("batch normalization" in note for note in make_training_graph(model).notes)


def test_a_bias_of_zeros_that_the_export_dropped_is_said(tmp_path: Path):
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    with torch.no_grad():
        module[2].bias.zero_()
    graph = make_training_graph(export(module, (torch.randn(2, 8),), tmp_path / "m.onnx", 18, True))
    (note,) = graph.notes
    assert "was exported without its bias, which was all zeros; it cannot be trained" in note
    assert "optimize=False" in note
    kept = make_training_graph(export(module, (torch.randn(2, 8),), tmp_path / "k.onnx", 18, True, optimize=False))
    assert kept.notes == ()
    assert match(kept, module) == ([], [])
