"""A product with a weight and the sum with its bias become one call with the same values and gradients (1e-10)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F

import onward
from onward.graph.training_graph import make_training_graph
from tests.graph.exported import export
from tests.graph.fusion.pairs import assert_fused, both, kinds, parse

K, N = 6, 4
RNG = np.random.default_rng(0)
STORED = {"w": RNG.normal(size=(K, N)), "wt": RNG.normal(size=(N, K)), "b": RNG.normal(size=N)}
FORMS = {
    "product and bias": "p = MatMul(x, w)\ny = Add(p, b)",
    "the bias first": "p = MatMul(x, w)\ny = Add(b, p)",
    "the weight transposed": "t = Transpose<perm=[1,0]>(wt)\np = MatMul(x, t)\ny = Add(p, b)",
    "the weight turned around": "t = Transpose(wt)\np = MatMul(x, t)\ny = Add(p, b)",
}
GEMMS = {
    "Gemm without a bias": "g = Gemm(x, w)\ny = Add(g, b)",
    "Gemm transposed": "g = Gemm<transB=1>(x, wt)\ny = Add(b, g)",
    "Gemm transposed twice": "t = Transpose(w)\ng = Gemm<transB=1>(x, t)\ny = Add(b, g)",
}
LEFT = {
    "a bias that broadcasts": ("p = MatMul(x, w)\ny = Add(p, one)", {"one": np.ones(1)}),
    "a sum that grows": ("p = MatMul(x, narrow)\ny = Add(p, b)", {"narrow": RNG.normal(size=(K, 1))}),
    "a bias for every row": ("p = MatMul(x, w)\ny = Add(p, rows)", {"rows": RNG.normal(size=(3, N))}),
    "a product that is read elsewhere": ("p = MatMul(x, w)\na = Add(p, b)\ny = Mul(a, p)", {}),
    "a weight for every sample": ("p = MatMul(x, deep)\ny = Add(p, b)", {"deep": RNG.normal(size=(2, K, N))}),
    "a bias of Gemm's own": ("r = Reshape(x, rows)\ng = Gemm(r, w, b)\ny = Add(g, b)", {"rows": np.array([-1, K])}),
    "scaled by Gemm": ("r = Reshape(x, rows)\ng = Gemm<alpha=2.0>(r, w)\ny = Add(g, b)", {"rows": np.array([-1, K])}),
    "transposed otherwise": ("t = Transpose<perm=[0,1]>(w)\np = MatMul(x, t)\ny = Add(p, b)", {}),
}


def model(body: str, axes: str, more: dict[str, np.ndarray] | None = None, opset: int = 18) -> onnx.ModelProto:
    words = body.replace("(", " ").replace(")", " ").replace(",", " ").split()
    stored = {name: value for name, value in {**STORED, **(more or {})}.items() if name in words}
    rank = axes.count(",") - ("Reshape" in body)
    return parse(f"double[{axes},{K}] x", f"double[{','.join('rst'[: rank + 1])},{N}] y", body, stored, opset)


def rows(*shape: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(*shape, K, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}


@pytest.mark.parametrize("form", FORMS, ids=list(FORMS))
@pytest.mark.parametrize("axes", ["s", "s,t", "s,t,u"], ids=["rows", "sequences", "heads"])
@pytest.mark.parametrize("opset", [7, 18])
def test_products(form: str, axes: str, opset: int) -> None:
    inputs = rows(*(5, 3, 2)[: axes.count(",") + 1])
    trained = ("wt" if "wt" in FORMS[form] else "w", "b")
    _, fused = assert_fused(model(FORMS[form], axes, opset=opset), inputs, {"linear": 1}, trained)
    weight = torch.from_numpy(STORED["wt"] if "wt" in trained else STORED["w"].T)
    wanted = F.linear(inputs["x"], weight, torch.from_numpy(STORED["b"]))
    torch.testing.assert_close(fused(**inputs), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", GEMMS, ids=list(GEMMS))
def test_gemm(form: str) -> None:
    assert_fused(model(GEMMS[form], "s"), rows(5), {"linear": 1}, ("wt" if "wt" in GEMMS[form] else "w", "b"))


@pytest.mark.parametrize("form", LEFT, ids=list(LEFT))
def test_what_is_no_linear_layer_stays(form: str) -> None:
    body, more = LEFT[form]
    plain, fused = both(model(body, "s,t", more))
    assert kinds(fused.graph) == {}
    inputs = rows(2, 3)
    torch.testing.assert_close(fused(**inputs), plain(**inputs), rtol=0, atol=0)


def test_integers_are_not_multiplied_by_it() -> None:
    stored = {"w": np.arange(K * N).reshape(K, N), "b": np.arange(N)}
    integers = parse(f"int64[s,{K}] x", f"int64[s,{N}] y", FORMS["product and bias"], stored)
    assert kinds(make_training_graph(integers, fuse=True, weights_to_train=())) == {}


def test_it_is_turned_off_by_name_and_for_values_that_a_run_names() -> None:
    proto = model(FORMS["product and bias"], "s")
    assert kinds(make_training_graph(proto, fuse=True, fusions_off=("linear",))) == {}
    assert kinds(make_training_graph(proto, fuse=True, keep=("p",))) == {}
    assert kinds(make_training_graph(proto, fuse=True, keep=("y",))) == {}


@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript", "dynamo"])
def test_exports_of_linear_layers(tmp_path: Path, dynamo: bool) -> None:
    """Either exporter's own way of writing it, against the module in torch."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(K, N), torch.nn.Tanh(), torch.nn.Linear(N, K)).eval()
    x = torch.randn(2, 3, K)
    net = onward.to_torch(export(module, (x,), tmp_path / "m.onnx", 18, dynamo))
    assert kinds(net.graph) == {"linear": 2}
    result = net(x)
    torch.testing.assert_close(result, module(x), rtol=1e-6, atol=1e-6)
    result.square().sum().backward()
    module(x).square().sum().backward()
    # The exporters name and turn weights as they like; lengths of gradients stay what they are.
    wanted, found = (
        sorted(0.0 if p.grad is None else float(p.grad.norm()) for p in parameters)
        for parameters in (module.parameters(), net.weights.values())
    )
    assert found == pytest.approx(wanted, rel=1e-5)
