"""What PyTorch's users do with a module works with one of `to_torch`, or says why not."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch.nn.utils import parametrizations, parametrize, prune

import onward
from onward.errors import ModelError
from onward.lowering.module import OnnxModule
from tests.graph.exported import export
from tests.mlp import data, save_mlp

X = torch.from_numpy(data(8)["x"])


@pytest.fixture
def net(tmp_path: Path) -> OnnxModule:
    """With batch normalization and dropout, so that there is state next to the weights."""
    return onward.to_torch(save_mlp(tmp_path, normalized=True, dropout=0.1))


def assert_is_apart(other: OnnxModule, net: OnnxModule, before: torch.Tensor) -> None:
    """Equal outputs; weights of its own, under the same names; training one leaves the other alone."""
    assert torch.equal(other(X), before)
    assert list(other.weights) == list(net.weights)
    assert {id(p) for p in other.parameters()}.isdisjoint(id(p) for p in net.parameters())
    assert other.weights["w1"] is dict(other.named_parameters())["w1"]
    other.train()
    other(X).sum().backward()
    torch.optim.SGD(other.parameters(), lr=1.0).step()
    assert torch.equal(net(X), before)
    assert not torch.equal(other.eval()(X), before)


def test_deepcopy(net: OnnxModule) -> None:
    assert_is_apart(copy.deepcopy(net), net, net(X).detach())


def test_pickle(net: OnnxModule, tmp_path: Path) -> None:
    """As bytes, by torch.save, and after training; the copy exports, too."""
    other = pickle.loads(pickle.dumps(net))
    assert_is_apart(other, net, net(X).detach())
    file = io.BytesIO()
    torch.save(other, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(X), other(X))
    onward.export(loaded, tmp_path / "loaded.onnx")
    (logits,) = onnxruntime.InferenceSession(tmp_path / "loaded.onnx").run(None, {"x": X.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), loaded(X).detach(), rtol=1e-5, atol=1e-6)


def test_state_dict(net: OnnxModule, tmp_path: Path) -> None:
    other = onward.to_torch(save_mlp(tmp_path, normalized=True, dropout=0.1))
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(0.1)
    other.load_state_dict(net.state_dict())
    assert torch.equal(other(X), net(X))
    assert list(net.state_dict()) == ["w1", "b1", "w2", "b2", "scale", "shift", "running_mean", "running_var"]


def test_compile(net: OnnxModule) -> None:
    compiled: Any = torch.compile(net, backend="aot_eager")
    torch.testing.assert_close(compiled(X), net(X), rtol=1e-5, atol=1e-6)
    compiled(X).sum().backward()
    assert net.weights["w1"].grad is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types(net: OnnxModule, dtype: torch.dtype) -> None:
    expected = net(X)
    moved = net.half() if dtype is torch.float16 else net.to(dtype)
    assert moved is net
    found = net(X.to(dtype))
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=3e-2, atol=3e-2)


def test_frozen(net: OnnxModule) -> None:
    net.weights["w1"].requires_grad_(False)
    net(X).sum().backward()
    assert net.weights["w1"].grad is None
    assert net.weights["w2"].grad is not None
    assert not net.requires_grad_(False)(X).requires_grad


def test_hooks(net: OnnxModule) -> None:
    seen: list[Any] = []
    net.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape))
    net.register_forward_hook(lambda module, inputs, output: output * 2)
    net.register_full_backward_hook(lambda module, into, out: seen.append(out[0].shape))
    plain = copy.deepcopy(net)
    plain._forward_hooks.clear()
    torch.testing.assert_close(net(X), plain(X) * 2)
    net(X.clone().requires_grad_()).sum().backward()
    assert seen[-1] == (8, 4)


class Doubled(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def test_parametrize(net: OnnxModule, tmp_path: Path) -> None:
    """The weight is what the parametrization makes of it, in passes, gradients, the mapping and the export."""
    original = net.weights["w1"].detach().clone()
    parametrize.register_parametrization(net, "w1", Doubled())
    assert torch.equal(net.weights["w1"], original * 2)
    net(X).sum().backward()
    held: Any = net.parametrizations
    assert held.w1.original.grad is not None
    onward.export(net, tmp_path / "doubled.onnx")
    (logits,) = onnxruntime.InferenceSession(tmp_path / "doubled.onnx").run(None, {"x": X.detach().numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), net(X).detach(), rtol=1e-5, atol=1e-6)
    parametrize.remove_parametrizations(net, "w1")
    assert torch.equal(net.weights["w1"], original * 2)


def test_weight_norm_and_spectral_norm(net: OnnxModule) -> None:
    before = net(X).detach()
    parametrizations.weight_norm(net, "w1")
    torch.testing.assert_close(net(X), before, rtol=1e-5, atol=1e-6)
    parametrizations.spectral_norm(net, "w2")
    assert torch.linalg.matrix_norm(net.weights["w2"].detach(), 2) < 1.5
    net(X).sum().backward()


def test_prune(net: OnnxModule) -> None:
    prune.l1_unstructured(net, "w1", amount=0.5)
    assert int((net.weights["w1"] == 0).sum()) == 24
    net(X).sum().backward()
    prune.remove(net, "w1")
    assert int((net.weights["w1"] == 0).sum()) == 24


def test_as_a_part_of_a_module(net: OnnxModule) -> None:
    whole = torch.nn.Sequential(net, torch.nn.Linear(4, 2))
    whole(X).sum().backward()
    assert all(weight.grad is not None for weight in whole.parameters())


def test_functional_calls(net: OnnxModule) -> None:
    weights = dict(net.named_parameters())
    gradients = torch.func.grad(lambda w: torch.func.functional_call(net, w, (X,)).square().sum())(weights)
    net(X).square().sum().backward()
    for name, weight in net.weights.items():
        torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-5, atol=1e-5)


def test_data_parallel_of_threads_is_refused(net: OnnxModule) -> None:
    with pytest.raises(ModelError, match=r"DataParallel does not work.*DistributedDataParallel, or onward train"):
        net._replicate_for_data_parallel()


# ------------------------------------------------------------------------------------------------- groups of weights


class TwoParts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).tanh())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "two.onnx"
    return export(TwoParts().eval(), (torch.zeros(2, 6),), path, 18, True, dynamic_shapes=({0: "batch"},))


def test_groups_by_module(exported: Path) -> None:
    net = onward.to_torch(exported)
    assert list(net.parameters_of("head")) == ["head.weight", "head.bias"]
    assert list(net.parameters_of("body.*.weight")) == ["body.0.weight", "body.2.weight"]
    groups = [
        {"params": list(net.parameters_of("body").values()), "lr": 0.0},
        {"params": list(net.parameters_of("head").values()), "lr": 0.1},
    ]
    before = copy.deepcopy(net)
    optimizer = torch.optim.SGD(groups, lr=1.0)
    net(X).square().sum().backward()
    optimizer.step()
    changed = [name for name, weight in net.weights.items() if not torch.equal(weight, before.weights[name])]
    assert changed == ["head.weight", "head.bias"]
    with pytest.raises(
        ModelError, match=r"'tail' matches no weight; the weights are body.0.weight.*Pass a name, a mod"
    ):
        net.parameters_of("head", "tail")


def test_summary(exported: Path) -> None:
    net = onward.to_torch(exported, weights_not_to_train=["body*"])
    summary = net.summary()
    assert [(layer.name, layer.operator, layer.output) for layer in summary.layers] == [
        ("body.0", "Gemm", ("batch", 8)), ("body.2", "Gemm", ("batch", 8)), ("head", "Gemm", ("batch", 4)),
    ]  # fmt: skip
    module = TwoParts()
    assert summary.trainable == sum(p.numel() for p in module.head.parameters())
    assert summary.trainable + summary.frozen == sum(p.numel() for p in module.parameters())
    assert summary.bytes == 4 * (summary.trainable + summary.frozen)
    lines = str(summary).splitlines()
    assert lines[0] == "inputs  x [batch, 6]"
    assert lines[3].split() == ["layer", "operator", "output", "trainable", "frozen", "bytes"]
    assert lines[-1].startswith("total")
    assert repr(summary) == str(summary)
    assert "<td" in summary._repr_html_()
    assert net._repr_html_() == summary._repr_html_()
    assert "x -> linear_2, 2 weights, 36 trainable parameters" in repr(net)


def test_summary_of_a_net_with_frozen_weights_and_statistics(net: OnnxModule) -> None:
    net.weights["w1"].requires_grad_(False)
    summary = net.summary()
    assert (summary.trainable, summary.frozen) == (8 + 16 + 36, 48 + 16)
    assert [layer.name for layer in summary.layers] == ["first", "norm", "second"]
    assert "48 frozen" in repr(net)
