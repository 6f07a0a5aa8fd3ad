"""Adapters as files: ONNX Runtime runs them on one base graph, and both kinds of file start another training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.numpy import load_file, save_file

import onward
from onward.artifacts.adapter_files import base_path_of, write_peft, write_runtime_adapter
from onward.errors import ModelError, ParametersError
from onward.lowering.module import OnnxModule
from onward.parameters import Adapter
from tests.artifacts.trained_run import convolutional_model
from tests.genai_models import EMPTY_CACHE, feeds, genai_model
from tests.graph.adapters.nets import adapted, computed, move, runtime
from tests.graph.adapters.readings import READINGS
from tests.graph.exported import Tied, export


def written(net: OnnxModule, path: Path) -> Path:
    tensors = net.tensors_by_name()
    return write_runtime_adapter(net.graph, tensors.__getitem__, path)[0]


def with_adapter(base: Path, adapter: Path | None, inputs: dict[str, np.ndarray]) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session, run = onnxruntime.InferenceSession(base, options), onnxruntime.RunOptions()
    loaded = onnxruntime.LoraAdapter()
    if adapter is not None:
        loaded.Load(str(adapter))
        run.add_active_adapter(loaded)
    result: np.ndarray = session.run(None, inputs, run)[0]
    return result


@pytest.mark.parametrize(
    "settings", [{}, {"start": "pissa"}, {"dora": True}, {"start": "pissa", "dora": True}], ids=str
)
@pytest.mark.parametrize("name", READINGS)
def test_onnxruntime_runs_several_adapters_on_one_base(name: str, settings: dict[str, Any], tmp_path: Path):
    case = READINGS[name]
    onnx.save(case.model(), tmp_path / "plain.onnx")
    plain = runtime(tmp_path / "plain.onnx", case.inputs)
    for rank in (1, 2):
        net = adapted(case.model(), rank=rank, **settings)
        move(net)
        path = written(net, tmp_path / f"of_rank_{rank}.onnx_adapter")
        expected = computed(net, case.inputs).detach().numpy()
        base = base_path_of(tmp_path / "of_rank_1.onnx_adapter")
        assert np.abs(with_adapter(base, path, case.inputs) - expected).max() < 1e-5
        assert np.abs(expected - plain).max() > 1e-3
    assert np.abs(with_adapter(base, None, case.inputs) - plain).max() < 1e-6


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("name", ["MatMul", "Conv", "Gather", "stack of experts"])
def test_an_adapter_of_onnxruntime_starts_a_training(name: str, dora: bool, tmp_path: Path):
    case = READINGS[name]
    net = adapted(case.model(), dora=dora)
    move(net)
    path = written(net, tmp_path / "first.onnx_adapter")
    again = adapted(case.model(), start_path=path, targets=(), dora=dora)
    assert (computed(net, case.inputs) - computed(again, case.inputs)).abs().max() < 1e-6


def test_other_tensors_that_train_are_inputs_too(tmp_path: Path):
    """A head trained in full, and running statistics: one file has all that a base needs, and starts another run."""
    case = convolutional_model()
    given = {"targets": ("conv.weight",), "train_too": ("fc.*",)}
    net = adapted(case, **given)
    move(net)
    inputs = {"image": np.random.default_rng(0).standard_normal((8, 1, 8, 8)).astype(np.float32)}
    net.train()(torch.from_numpy(inputs["image"]))
    net.eval()
    onnx.save(case, tmp_path / "plain.onnx")
    path = written(net, tmp_path / "a.onnx_adapter")
    expected, base = computed(net, inputs).detach().numpy(), base_path_of(path)
    plain = runtime(tmp_path / "plain.onnx", inputs)
    assert np.abs(with_adapter(base, path, inputs) - expected).max() < 1e-5 < np.abs(expected - plain).max()
    assert np.abs(with_adapter(base, None, inputs) - plain).max() < 1e-6
    again = adapted(case, **given, start_path=path).eval()
    assert np.abs(computed(again, inputs).detach().numpy() - expected).max() < 1e-6
    with pytest.raises(ModelError, match=r"2 tensors of .* fc\.bias, fc\.weight.* in adapter\.train_too"):
        adapted(case, targets=given["targets"], start_path=path)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_an_adapter_has_the_types_of_its_base(dtype: type, tmp_path: Path):
    """The trained matrices of a file with 16-bit weights are fp32; its graph takes fp16."""
    plain = onward.to_torch(genai_model(False, dtype), fixed_inputs=EMPTY_CACHE, dtype=torch.float32)
    net = onward.add_adapter(plain, rank=2, dora=True)
    move(net)
    path = written(net, tmp_path / "a.onnx_adapter")
    inputs = feeds(dtype)
    expected = computed(net, {name: inputs[name] for name in ("input_ids", "attention_mask")}).detach().numpy()
    found = with_adapter(base_path_of(path), path, inputs)
    assert found.dtype == dtype
    assert np.abs(found - expected).max() < (1e-5 if dtype is np.float32 else 2e-2) * np.abs(expected).max()


@pytest.mark.parametrize("settings", [{}, {"dora": True}, {"rslora": True}, {"alpha": None}])
def test_a_peft_folder_comes_back_with_the_same_bits(settings: dict[str, Any], tmp_path: Path):
    model = renamed(READINGS["MatMul"].model(), "net.layers.0.q_proj.weight")
    given = {"targets": ("q_proj",), "rank": 3, "alpha": 6.0, **settings}
    net = adapted(model, **given)
    move(net)
    folder = peft(net, tmp_path / "one", **given)
    again = adapted(model, **{**given, "targets": ()}, start_path=folder, module_prefix="net.")
    for name, weight in net.weights.items():
        assert torch.equal(weight, again.weights[name])
    second = peft(again, tmp_path / "two", **given)
    assert (
        load_file(folder / "adapter_model.safetensors").keys() == load_file(second / "adapter_model.safetensors").keys()
    )
    files = [folder / name for name in ("adapter_config.json", "adapter_model.safetensors")]
    assert all(one.read_bytes() == (second / one.name).read_bytes() for one in files)
    assert files[0].stat().st_mode == files[1].stat().st_mode, "whoever may read one may read the other"


def peft(net: OnnxModule, folder: Path, **given: Any) -> Path:
    tensors = net.tensors_by_name()
    return write_peft(net.graph, tensors.__getitem__, folder, Adapter(**given, module_prefix="net."))


def renamed(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """The weight under the name that it has in a torch module."""
    model.graph.initializer[0].name = name
    for node in model.graph.node:
        for index, one in enumerate(node.input):
            if one == "w":
                node.input[index] = name
    return model


def test_what_a_file_has_no_place_for_is_named(tmp_path: Path):
    case = READINGS["MatMul"].model()
    with pytest.raises(ParametersError, match="'w' cannot be in a PEFT folder, because its module is not known"):
        peft(adapted(case), tmp_path / "peft", rank=2)
    net = onward.to_torch(case)
    with pytest.raises(ParametersError, match=r"nothing was trained with any\. Set adapter\.rank"):
        written(net, tmp_path / "a.onnx_adapter")


def test_a_prefix_that_the_modules_do_not_have_is_refused(tmp_path: Path):
    net = adapted(renamed(READINGS["MatMul"].model(), "module.layers.0.q_proj.weight"), rank=2, targets=("q_proj",))
    with pytest.raises(ParametersError) as caught:
        peft(net, tmp_path / "peft", rank=2)
    assert str(caught.value) == (
        "adapter.module_prefix is 'net.', but the module path 'module.layers.0.q_proj.weight' does not begin with it. "
        "Set it to what comes before the names that the original module has, or remove it."
    )


class WithInner(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.norm(self.embedding(tokens))))


@pytest.mark.parametrize(
    "given", [{"targets": ("[eh]*",)}, {"targets": ("*inner*",), "train_too": ("[eh]*",)}], ids=str
)
@pytest.mark.parametrize("dynamo", [True, False], ids=["new", "old"])
def test_a_weight_that_two_modules_share_is_refused(dynamo: bool, given: dict[str, Any], tmp_path: Path):
    """PEFT gives the embedding and the last layer each its own: the folder would compute something else."""
    path = export(
        WithInner(), (torch.zeros(2, 3, dtype=torch.int64),), tmp_path / "m.onnx", 18 if dynamo else 17, dynamo
    )
    net = adapted(onnx.load(path), rank=2, **given)
    with pytest.raises(ParametersError) as caught:
        write_peft(net.graph, net.tensors_by_name().__getitem__, tmp_path / "peft", Adapter(rank=2, **given))
    assert "cannot be in a PEFT folder, because the modules embedding and head share it" in str(caught.value)
    assert str(caught.value).endswith("or leave the weight out of adapter.targets and adapter.train_too.")


def _config(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def _more_tensors(path: Path) -> None:
    save_file({**load_file(path), "base_model.model.other.lora_A.weight": np.zeros(1)}, path)


@pytest.mark.parametrize(
    ("change", "settings", "words"),
    [
        (lambda folder: _config(folder, peft_type="IA3"), {}, "is of the type 'IA3'; expected LORA"),
        (lambda folder: _config(folder, lora_alpha=9), {}, "Set adapter.alpha and adapter.rslora as in the file"),
        (lambda folder: _config(folder, use_dora=True), {}, "set adapter.dora alike"),
        (lambda folder: (folder / "adapter_config.json").unlink(), {}, "adapter_config.json cannot be read"),
        (lambda folder: (folder / "adapter_model.safetensors").write_text("x"), {}, "safetensors cannot be read"),
        (lambda folder: None, {"rank": 2, "alpha": 4.0}, "Set adapter.rank to that of the file, which is 3"),
        (lambda folder: None, {"module_prefix": ""}, "no linear layers|nothing in it"),
        (
            lambda folder: _more_tensors(folder / "adapter_model.safetensors"),
            {},
            "1 tensors of .* are of no adapted weight: base_model.model.other",
        ),
    ],
)  # fmt: skip
def test_files_to_start_with_are_checked(change: Any, settings: dict[str, Any], words: str, tmp_path: Path):
    model = renamed(READINGS["MatMul"].model(), "net.layers.0.q_proj.weight")
    given = {"rank": 3, "alpha": 6.0, "targets": ()}
    folder = peft(adapted(model, **given), tmp_path / "peft", **given)
    change(folder)
    with pytest.raises(ModelError, match=words):
        adapted(model, **{**given, "module_prefix": "net.", **settings}, start_path=folder)


def test_a_file_that_is_no_adapter_is_named(tmp_path: Path):
    (tmp_path / "a.onnx_adapter").write_bytes(b"nothing")
    with pytest.raises(ModelError, match=r"(?s)cannot be read: .* Name a PEFT folder or an \.onnx_adapter file"):
        adapted(READINGS["MatMul"].model(), start_path=tmp_path / "a.onnx_adapter")
