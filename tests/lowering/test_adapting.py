"""`onward.add_adapter`, and adapters in `to_torch` and `fit`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import onward
from onward.errors import ModelError, ParametersError
from onward.fitting.fit import fit
from tests.graph.adapters.nets import computed, move, runtime
from tests.graph.adapters.readings import READINGS
from tests.mlp import build_mlp, data

INPUTS = {"x": data(5)["x"]}


@pytest.mark.parametrize("name", READINGS)
def test_a_model_file_gets_adapters_that_start_as_it_was(name: str, tmp_path: Path):
    case = READINGS[name]
    onnx.save(case.model(), tmp_path / "base.onnx")
    adapted = onward.add_adapter(tmp_path / "base.onnx", rank=2, alpha=3.0, targets=["w"], dropout=0.1)
    assert isinstance(adapted, onnx.ModelProto)
    onnx.save(adapted, tmp_path / "adapted.onnx")
    base = runtime(tmp_path / "base.onnx", case.inputs)
    assert np.abs(runtime(tmp_path / "adapted.onnx", case.inputs) - base).max() < 2e-6
    net = onward.to_torch(tmp_path / "adapted.onnx", weights_to_train=["*.lora_?"])
    assert set(net.weights) == {"w.lora_A", "w.lora_B"}
    move(net)
    onward.export(net, tmp_path / "trained.onnx")
    trained = runtime(tmp_path / "trained.onnx", case.inputs)
    assert np.abs(trained - computed(net, case.inputs).detach().numpy()).max() < 1e-5
    assert np.abs(trained - base).max() > 1e-3


def test_what_is_given_is_what_is_returned():
    assert isinstance(onward.add_adapter(build_mlp(), 2, targets=["w1"]), onnx.ModelProto)
    assert isinstance(onward.add_adapter(ir.from_proto(build_mlp()), 2, targets=["w1"]), ir.Model)


@pytest.mark.parametrize("options", [{}, {"dora": True}, {"start": "pissa"}, {"train_too": ["b2"]}])
def test_a_module_gets_adapters_of_its_weights_as_they_are(options: dict, tmp_path: Path):
    net = onward.to_torch(build_mlp())
    move(net)
    before = computed(net, INPUTS)
    adapted = onward.add_adapter(net, rank=2, targets=["w1", "w2"], **options)
    assert (computed(adapted, INPUTS) - before).abs().max() < 1e-5
    assert adapted.weights["b1"] is net.weights["b1"]
    trains = {name for name, weight in adapted.weights.items() if weight.requires_grad}
    assert {name.split(".")[0] for name in trains if ".lora_" in name} == {"w1", "w2"}
    assert {name for name in trains if ".lora_" not in name} == set(options.get("train_too", ()))
    optimizer = torch.optim.SGD(adapted.parameters(), lr=0.5)
    for _ in range(2):  # the gradient of A is zero as long as B is
        optimizer.zero_grad()
        computed(adapted, INPUTS).square().mean().backward()
        optimizer.step()
    after = computed(adapted, INPUTS).detach()
    assert (after - before).abs().max() > 1e-2
    onward.export(adapted, tmp_path / "merged.onnx")
    assert np.abs(runtime(tmp_path / "merged.onnx", INPUTS) - after.numpy()).max() < 1e-5
    assert len(onnx.load(tmp_path / "merged.onnx").graph.node) == len(build_mlp().graph.node)


def test_mistakes_are_named():
    with pytest.raises(ModelError, match=r"pass the module that onward\.to_torch makes of it"):
        onward.add_adapter(build_mlp(), 2, targets=["w1"], dora=True)
    with pytest.raises(ParametersError, match=r"adapter\.ranks is unknown"):
        onward.add_adapter(build_mlp(), 2, ranks=3)
    once = onward.add_adapter(build_mlp(), 2, targets=["w1"])
    with pytest.raises(ModelError, match=r"'w1\.lora_A', so that it has adapters already"):
        onward.add_adapter(once, 2, targets=["w1"])


def test_fit_trains_adapters(tmp_path: Path):
    onnx.save(build_mlp(), tmp_path / "mlp.onnx")
    features = {name: array for name, array in data(64).items() if name != "target"}
    settings = {"rank": 2, "targets": ["w*"]}
    result = fit(
        tmp_path / "mlp.onnx", features, loss="softmax_cross_entropy", steps=30, learning_rate=0.1,
        adapter=settings, progress=False,
    )  # fmt: skip
    assert all(".lora_" in name for name in result.runner.net.weights)
    assert result.summary.last_loss is not None
    assert result.summary.first_loss is not None
    assert result.summary.last_loss < 0.5 * result.summary.first_loss
    result.export(tmp_path / "trained.onnx")
    assert (
        np.abs(runtime(tmp_path / "trained.onnx", INPUTS) - computed(result.net, INPUTS).detach().numpy()).max() < 1e-5
    )
