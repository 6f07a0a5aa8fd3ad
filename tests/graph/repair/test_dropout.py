"""Dropout put back after what the user names: active in training, absent from evaluation and from the exported file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import onward
from onward.errors import ModelError
from onward.parameters.training import DropoutRule
from tests.one_node import make_model


def softmax_then_scale(opset: int) -> onnx.ModelProto:
    """softmax(x) * scale, exported without the dropout it was trained with."""
    model = make_model("Softmax", {"x": np.zeros((1, 1000), np.float32)}, {"axis": 1}, opset)
    graph = model.graph
    (softmax,) = graph.node
    softmax.output[0] = "attention"
    graph.node.append(onnx.helper.make_node("Mul", ["attention", "scale"], ["y"], name="scaling"))
    graph.initializer.append(onnx.numpy_helper.from_array(np.full((1000,), 2.0, np.float32), "scale"))
    graph.output[0].name = "y"
    return model


@pytest.mark.parametrize("opset", [7, 11, 12, 18, 23])
@pytest.mark.parametrize(
    "rule",
    [DropoutRule(ratio=0.25, after_operators=("Softmax",)), DropoutRule(ratio=0.25, after_values=("atten*",))],
    ids=["operators", "values"],
)
def test_a_quarter_is_dropped_in_training_and_nothing_outside_of_it(opset: int, rule: DropoutRule) -> None:
    net = onward.to_torch(softmax_then_scale(opset), revive_dropout=[rule])
    assert net.graph.notes == ("dropout of 0.25 put back after 1 nodes, for training only.",)
    x = torch.zeros(1, 1000)
    torch.testing.assert_close(net(x), torch.full((1, 1000), 2e-3))
    net.train()
    torch.manual_seed(0)
    y = net(x)
    kept = y != 0
    # 1000 draws: four standard deviations of the share are 0.055.
    assert abs(float(kept.float().mean()) - 0.75) < 0.055
    torch.testing.assert_close(y[kept], torch.full((int(kept.sum()),), 2e-3 / 0.75))


def test_the_exported_file_has_no_dropout(tmp_path: Path) -> None:
    rule = DropoutRule(ratio=0.5, after_operators=("Softmax",))
    net = onward.to_torch(softmax_then_scale(18), revive_dropout=[rule])
    onward.export(net, tmp_path / "out.onnx")
    assert [node.op_type for node in onnx.load(tmp_path / "out.onnx").graph.node] == ["Softmax", "Mul"]


def test_a_rule_that_names_nothing_of_the_model() -> None:
    rule = DropoutRule(ratio=0.5, after_operators=("Gelu",), after_values=("h.*",))
    with pytest.raises(ModelError, match=r"revive_dropout\[0\] names Gelu, h\.\*, which no node of the model computes"):
        onward.to_torch(softmax_then_scale(18), revive_dropout=[rule])
