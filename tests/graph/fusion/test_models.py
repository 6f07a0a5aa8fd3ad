"""Fusion of entire models: onward's own at every opset, torch's exports; what it leaves alone; how it is turned off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onward
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from onward.models import create_model
from tests.graph.exported import Encoder, export
from tests.graph.fusion.pairs import TINY, attention_calls, kinds, run, specialized

TOKENS = torch.randint(0, 300, (2, 6), generator=torch.Generator().manual_seed(0))


WRITTEN_OUT = {"gpt2": {"layer_normalization": 5, "gelu": 2}, "bert": {"layer_normalization": 6, "gelu": 3}}
"""What opsets without the operators add to two fused attentions."""


LINEAR = {"gpt2": 8, "bert": 16}
"""Products with their biases: of two layers, and of what is before and after them."""


SINCE = {"layer_normalization": 17, "gelu": 20}


def features(name: str) -> dict[str, torch.Tensor]:
    if name == "gpt2":
        return {"input_ids": TOKENS}
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]])
    return {"input1": TOKENS, "input2": torch.zeros_like(TOKENS), "input3": mask}


@pytest.mark.parametrize("opset", [13, 14, 17, 18, 20, 23])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_own_models(name: str, opset: int) -> None:
    model = create_model(name, opset=opset, **TINY)
    plain, fused = OnnxModule(make_training_graph(model)), OnnxModule(make_training_graph(model, fuse=True))
    written = {kind: n for kind, n in WRITTEN_OUT[name].items() if opset < SINCE[kind]}
    assert kinds(fused.graph) == {"attention": 2, **written, "linear": LINEAR[name]}
    expected, wanted = run(plain.double(), plain, features(name))
    found, gradients = run(fused.double(), fused, features(name))
    for left, right in zip(expected, found, strict=True):
        # The constants of GELU are rounded to float32 in the graph, and exact in torch's function.
        torch.testing.assert_close(right, left, rtol=1e-6, atol=1e-7)
    assert gradients.keys() == wanted.keys()
    largest = max(gradient.abs().max().item() for gradient in wanted.values())
    for key, gradient in wanted.items():
        torch.testing.assert_close(gradients[key], gradient, rtol=1e-5, atol=1e-7 * largest)


def test_gpt2_reads_no_mask() -> None:
    fused = OnnxModule(make_training_graph(create_model("gpt2", opset=18, **TINY), fuse=True))
    assert attention_calls(specialized(fused, features("gpt2"))) == [{"masked": False, "causal": True}] * 2


@pytest.mark.parametrize("opset", [14, 17])
def test_torchscript_encoder_computes_like_the_module(tmp_path: Path, opset: int) -> None:
    torch.manual_seed(0)
    module, x = Encoder().eval(), torch.randn(2, 16, 16)
    net = onward.to_torch(export(module, (x,), tmp_path / "encoder.onnx", opset, dynamo=False))
    norms = {"layer_normalization": 6} if opset < 17 else {}
    assert kinds(net.graph) == {"attention": 2, **norms, "linear": 8}
    torch.testing.assert_close(net(x), module(x), rtol=1e-5, atol=1e-5)
    net(x).sum().backward()
    module(x).sum().backward()
    parameter = module.encoder.layers[0].self_attn.in_proj_bias
    found = net.weights["encoder.layers.0.self_attn.in_proj_bias"].grad
    torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-4)


class Attention(torch.nn.Module):
    """torch's own call, for the exporters to write out."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.joint = torch.nn.Linear(8, 24)
        self.causal = causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (part.reshape(batch, tokens, 2, 4).transpose(1, 2) for part in self.joint(x).split(8, -1))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return y.transpose(1, 2).reshape(batch, tokens, 8)


@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript", "dynamo"])
@pytest.mark.parametrize("opset", [14, 18, 23])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_exported_scaled_dot_product_attention(tmp_path: Path, causal: bool, opset: int, dynamo: bool) -> None:
    if (dynamo and opset < 18) or (not dynamo and opset > 20):
        pytest.skip("not an opset of this exporter")
    torch.manual_seed(0)
    module, x = Attention(causal).eval(), torch.randn(2, 6, 8)
    net = onward.to_torch(export(module, (x,), tmp_path / "attention.onnx", opset, dynamo))
    assert kinds(net.graph) == {"linear": 1} | ({} if opset == 23 else {"attention": 1})
    torch.testing.assert_close(net(x), module(x), rtol=1e-5, atol=1e-6)
    if opset < 23:
        assert attention_calls(specialized(net, {net.program.inputs[0]: x})) == [{"masked": False, "causal": causal}]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_low_precision_is_no_less_exact(name: str, dtype: torch.dtype) -> None:
    """Under autocast with 16-bit weights, against float64: gradients on the whole no worse than without fusion."""
    model = create_model(name, opset=14, seed=3, **TINY)
    exact = OnnxModule(make_training_graph(model)).double()
    _, wanted = run(exact, exact, features(name))
    errors = {}
    for fuse in (False, True):
        net = OnnxModule(make_training_graph(model, fuse=fuse))

        def call(net: Any = net, **given: torch.Tensor) -> Any:
            low = {n: t.to(dtype) if t.is_floating_point() else t for n, t in net.tensors_by_name().items()}
            with torch.autocast("cpu", dtype=dtype):
                results = net.program(False, net.device, [given[n] for n in net.program.inputs], low)
            return tuple(result.float() for result in results)

        _, found = run(call, net, features(name))
        total = sum(float((found[n].double() - wanted[n]).square().sum()) for n in wanted)
        errors[fuse] = (total / sum(float(g.square().sum()) for g in wanted.values())) ** 0.5
    assert errors[True] <= 1.15 * errors[False]
    assert errors[True] < 0.05
    assert np.isfinite(errors[True])
