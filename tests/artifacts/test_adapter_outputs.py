"""What a run with adapters leaves, by `adapter.outputs` and by `onward export --adapter`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import yaml

from onward.cli import main
from onward.data.in_memory import InMemoryDataLoader
from onward.errors import ParametersError
from tests.artifacts.test_adapter_files import with_adapter
from tests.graph.adapters.nets import runtime
from tests.mlp import CROSS_ENTROPY, build_mlp, data, start, write_shards

MODULES = {"w1": "layers.0.weight", "w2": "head.weight"}


def prepare(folder: Path, **adapter: Any) -> Path:
    model = build_mlp()
    for old, new in MODULES.items():
        for tensor in model.graph.initializer:
            tensor.name = new if tensor.name == old else tensor.name
        for node in model.graph.node:
            node.input[:] = [new if name == old else name for name in node.input]
    onnx.save(model, folder / "mlp.onnx")
    write_shards(folder / "train", data(32))
    run = {
        "paths": {"model_path": "mlp.onnx", "train_data_dir": "train", "output_dir": "out"},
        "loss": dict(CROSS_ENTROPY),
        "training": {"batch_size": 4, "num_train_steps": 8},
        "learning_rate": {"initial_lr": 0.1},
        "checkpoint": {"checkpoints_dir": "saved"},
        "adapter": {"rank": 2, "alpha": 4, "targets": ["*"], **adapter},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder / "run.yaml"


def test_a_run_leaves_all_forms_and_export_writes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = prepare(tmp_path, outputs=["merged", "peft", "onnx_adapter"])
    assert main(["train", str(path)]) == 0
    out = tmp_path / "out"
    names = ("mlp_trained.onnx", "mlp_trained_peft", "mlp_trained.onnx_adapter", "mlp_trained_base.onnx")
    assert f"trained model written to {', '.join(str(out / name) for name in names)}." in capsys.readouterr().out
    assert sorted(one.name for one in out.iterdir() if "." in one.name or one.is_dir())[:4] == [
        "mlp_trained.onnx", "mlp_trained.onnx_adapter", "mlp_trained_base.onnx", "mlp_trained_peft",
    ]  # fmt: skip
    inputs = {"x": data(5)["x"]}
    merged, base = runtime(out / "mlp_trained.onnx", inputs), runtime(tmp_path / "mlp.onnx", inputs)
    assert np.abs(merged - base).max() > 0.1
    from_adapter = with_adapter(out / "mlp_trained_base.onnx", out / "mlp_trained.onnx_adapter", inputs)
    assert np.abs(from_adapter - merged).max() < 1e-5
    for form, name in (("merged", "m.onnx"), ("peft", "p"), ("onnx_adapter", "m.onnx_adapter")):
        assert main(["export", "mlp.onnx", "--checkpoint", "saved", "-o", name, "--adapter", form]) == 0
    assert (tmp_path / "m.onnx").read_bytes() == (out / "mlp_trained.onnx").read_bytes()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "p" / name).read_bytes() == (out / "mlp_trained_peft" / name).read_bytes()
    assert np.array_equal(with_adapter(tmp_path / "m_base.onnx", tmp_path / "m.onnx_adapter", inputs), from_adapter)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-o", "m.onnx", "--adapter", "peft", "--optimize"], "--adapter peft writes adapters of a checkpoint"),
        (
            ["-o", "m.onnx", "--checkpoint", "saved", "--adapter", "peft", "--optimize"],
            "leave them out with --adapter peft",
        ),
    ],
)
def test_options_that_do_not_fit_are_named(
    options: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(prepare(tmp_path))]) == 0
    assert main(["export", "mlp.onnx", *options]) == 2
    assert words in capsys.readouterr().err


def test_a_form_without_a_place_is_refused_before_training(tmp_path: Path):
    with pytest.raises(ParametersError, match="'w1' cannot be in a PEFT folder"):
        start(tmp_path, adapter={"rank": 2, "targets": ["w*"], "outputs": ["peft"]}, paths={"output_dir": tmp_path})


def test_the_second_matrix_learns_at_its_own_rate(tmp_path: Path):
    """With one step of SGD, B moves as far as the ratio says, and everything else as without it."""
    ends = []
    for ratio in (1, 16):
        adapter = {"rank": 2, "targets": ["w1"], "learning_rate_ratio": ratio}
        runner, _ = start(tmp_path, adapter=adapter, training={"num_train_steps": 1}, paths={"output_dir": None})
        before = {name: weight.detach().clone() for name, weight in runner.net.weights.items()}
        runner.run(InMemoryDataLoader(data(4)))
        ends.append({name: weight.detach() - before[name] for name, weight in runner.net.weights.items()})
    assert torch.allclose(ends[1]["w1.lora_B"], 16 * ends[0]["w1.lora_B"], rtol=1e-5)
    assert ends[0]["w1.lora_B"].abs().max() > 0
    assert torch.equal(ends[0]["w1.lora_A"], ends[1]["w1.lora_A"])
