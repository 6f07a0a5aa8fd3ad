"""`onward init` on tiny models and data of every kind: what it writes trains, and what it refuses it explains."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from onward.cli import main
from onward.parameters import Parameters


def save_iris_like(path: Path) -> None:
    generator = np.random.default_rng(0)
    rows = ["length,width,kind"]
    for k in range(120):
        kind = k // 40
        a, b = generator.normal((kind, -kind), 0.3)
        rows.append(f"{a:.3f},{b:.3f},{('oak', 'elm', 'fir')[kind]}")
    path.write_text("\n".join(rows) + "\n")


def export(net: nn.Module, example: torch.Tensor, path: Path, inputs: list[str], outputs: list[str]) -> None:
    torch.onnx.export(
        net.eval(), (example,), path, input_names=inputs, output_names=outputs, dynamo=False, opset_version=17,
        dynamic_axes={name: {0: "batch"} for name in (*inputs, *outputs)},
    )  # fmt: skip


def test_a_table_with_words_as_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))
    export(net, torch.randn(2, 2), tmp_path / "net.onnx", ["x"], ["logits"])
    save_iris_like(tmp_path / "trees.csv")
    assert main(["init", "net.onnx", "trees.csv"]) == 0
    said = capsys.readouterr().out
    assert "onward pack trees.csv data" in said
    parameters = Parameters.load("run.yaml")
    assert parameters.loss.type == "softmax_cross_entropy"
    assert (parameters.loss.prediction, parameters.loss.label) == ("logits", "kind")
    assert main(["train", "run.yaml", "--training.num_epochs", "10"]) == 0
    said = capsys.readouterr().out
    assert (tmp_path / "trained" / "net_trained.onnx").is_file()
