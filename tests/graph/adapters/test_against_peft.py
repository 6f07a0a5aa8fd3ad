"""Adapters of exported networks train as PEFT trains those of the original: outputs, gradients and twenty updates."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from onward.artifacts.adapter_files import write_peft
from onward.graph.adapters.start_files import TENSORS_NAME
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from onward.parameters import Adapter
from tests.graph.adapters.peft_networks import NETWORKS

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

BOUND = 1e-5
QUICK = {("llama", "lora"), ("vit", "dora")}
CASES = [
    pytest.param(name, kind, marks=[] if (name, kind) in QUICK else pytest.mark.slow)
    for name in NETWORKS
    for kind in ("lora", "dora")
]


def _with_peft(network: nn.Module, targets: list[str], kind: str, folder: Path) -> nn.Module:
    """The network with PEFT's adapters, away from their start and saved."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, use_dora=kind == "dora", lora_dropout=0.0)
    inner: Any = network.inner
    network.inner = peft.get_peft_model(inner, config)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in network.inner.named_parameters():
            if parameter.requires_grad:
                noise = 0.1 * torch.randn(parameter.shape, generator=random)
                parameter.copy_(parameter * (1 + noise) if "magnitude" in name else parameter + noise)
    network.inner.save_pretrained(folder)
    return network


def _key(name: str) -> str:
    """As PEFT's own files call a parameter."""
    return name.removeprefix("inner.").replace(".default", "").replace("magnitude_vector.weight", "magnitude_vector")


@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_twenty_updates_are_those_of_peft(name: str, kind: str, tmp_path: Path):
    case = NETWORKS[name]
    torch.manual_seed(0)
    base = case.make().eval()
    torch.onnx.export(base, case.inputs, tmp_path / "m.onnx", dynamo=True, verbose=False)
    theirs = _with_peft(copy.deepcopy(base), case.targets, kind, tmp_path / "peft")
    settings = Adapter(
        rank=4, alpha=8.0, dora=kind == "dora", start_path=tmp_path / "peft", module_prefix="inner."
    )  # fmt: skip
    ours = OnnxModule(make_training_graph(tmp_path / "m.onnx", adapter=settings, fuse=True))
    folder = write_peft(ours.graph, ours.tensors_by_name().__getitem__, tmp_path / "back", settings)
    started, returned = load_file(tmp_path / "peft" / TENSORS_NAME), load_file(folder / TENSORS_NAME)
    assert started.keys() == returned.keys()
    assert all(torch.equal(tensor, returned[key]) for key, tensor in started.items())
    trained = {_key(key): parameter for key, parameter in theirs.named_parameters() if parameter.requires_grad}
    assert trained.keys() == started.keys()
    assert sum(p.numel() for p in trained.values()) == sum(p.numel() for p in ours.weights.values())
    optimizers = [torch.optim.AdamW(list(one), lr=1e-3) for one in (trained.values(), ours.weights.values())]
    target = torch.randn(theirs(*case.inputs).shape, generator=torch.Generator().manual_seed(4))
    for update in range(20):
        losses = []
        for network, optimizer in zip((theirs, ours), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append((network(*case.inputs) - target).square().mean())
            losses[-1].backward()
        assert float(losses[1]) == pytest.approx(float(losses[0]), rel=BOUND)
        if update == 0:
            gradients = {key: p.grad for key, p in trained.items()}
            _assert_alike(gradients, write_gradients(ours, settings, tmp_path / "gradients"))
        for optimizer in optimizers:
            optimizer.step()
    write_peft(ours.graph, ours.tensors_by_name().__getitem__, tmp_path / "back", settings)
    _assert_alike(dict(trained), load_file(tmp_path / "back" / TENSORS_NAME))
    loaded = copy.deepcopy(base)
    loaded.inner = peft.PeftModel.from_pretrained(loaded.inner, tmp_path / "back")
    with torch.no_grad():
        assert (loaded(*case.inputs) - ours(*case.inputs)).abs().max() < BOUND


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_dropout_under_dora_is_that_of_peft(kind: str, tmp_path: Path):
    """The same numbers are drawn: what is dropped is missing from the base's share of the direction, too."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 5) if kind == "linear" else nn.Conv2d(3, 5, (3, 2))
    x = torch.randn((4, 6) if kind == "linear" else (2, 3, 6, 5))
    network = nn.ModuleDict({"proj": layer})
    network.forward = layer.forward  # type: ignore[method-assign]
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["proj"], use_dora=True, lora_dropout=0.5)
    weight, bias = (parameter.detach().clone() for parameter in (layer.weight, layer.bias))
    theirs = peft.get_peft_model(network, config)
    adapted_layer = theirs.base_model.model["proj"]
    theirs.base_model.model.forward = adapted_layer.forward
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.3 * torch.rand_like(parameter) if parameter.requires_grad else 0)
    theirs.save_pretrained(tmp_path)
    op_type, attributes = ("Gemm", {"transB": 1}) if kind == "linear" else ("Conv", {})
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node(op_type, ["x", "proj.weight", "proj.bias"], ["y"], **attributes)],
        "one_layer",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, list(x.shape))],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(weight.numpy(), "proj.weight"),
         onnx.numpy_helper.from_array(bias.numpy(), "proj.bias")],
    )  # fmt: skip
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    settings = Adapter(rank=2, alpha=6.0, dora=True, dropout=0.5, start_path=tmp_path)
    ours = OnnxModule(make_training_graph(model, adapter=settings, fuse=True))
    for is_training in (True, False):
        results = []
        for net in (theirs.train(is_training), ours.train(is_training)):
            torch.manual_seed(7)
            net.zero_grad()
            results.append(net(x))
            results[-1].square().sum().backward()
        torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)
        found = write_gradients(ours, settings, tmp_path / "gradients")
        expected = {_key(name): one.grad for name, one in theirs.named_parameters() if one.requires_grad}
        _assert_alike(expected, found)


def write_gradients(net: OnnxModule, settings: Adapter, folder: Path) -> dict[str, torch.Tensor]:
    """The gradients by PEFT's names."""
    gradients = {name: weight.grad for name, weight in net.weights.items()}
    write_peft(net.graph, gradients.__getitem__, folder, settings)  # type: ignore[arg-type]
    return load_file(folder / TENSORS_NAME)


def _assert_alike(expected: dict[str, Any], actual: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == actual.keys()
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    for key, tensor in expected.items():
        assert (tensor.detach().reshape(actual[key].shape) - actual[key]).abs().max() < BOUND * scale, key
