"""Training graphs of fused networks are in standard operators too, and give onnxruntime the same numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from onward.artifacts.training_graph import write_training_graph
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from onward.models import create_model
from tests.artifacts.plain_runtime import autograd_gradients, call, largest_error, open_session
from tests.graph.fusion.pairs import kinds, parse

BOUND = 2e-5


def check(net: OnnxModule, path: Path, features: dict[str, torch.Tensor]) -> None:
    write_training_graph(net, path)
    expected = autograd_gradients(net.train(), features)
    found = call(open_session(path), features)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert largest_error(found[name], value) < BOUND, name


def test_gated_layer(tmp_path: Path) -> None:
    """RMS normalization, SwiGLU and GELU, each written out."""
    body = (
        "s = Mul(x, x)\nv = ReduceMean<axes=[-1]>(s)\ne = Add(v, eps)\nr = Sqrt(e)\nq = Div(x, r)\nn = Mul(q, scale)\n"
        "g = MatMul(n, gate)\nu = MatMul(n, up)\nt = Sigmoid(g)\nw = Mul(g, t)\nh = Mul(w, u)\n"
        "a = Div(h, root2)\nf = Erf(a)\no = Add(f, one)\np = Mul(h, o)\nk = Mul(p, half)\ny = ReduceMean<keepdims=0>(k)"
    )
    rng = np.random.default_rng(0)
    stored = {name: rng.normal(size=(6, 5)).astype(np.float32) for name in ("gate", "up")}
    stored["scale"] = rng.normal(size=6).astype(np.float32)
    numbers = {"eps": 1e-5, "root2": 2**0.5, "one": 1.0, "half": 0.5}
    model = parse(
        "float[3,6] x", "float y", body, {**stored, **{n: np.float32(v).reshape(()) for n, v in numbers.items()}}, 17
    )
    graph = make_training_graph(
        model, loss=LossSpec(type="output", prediction="y"), weights_to_train=list(stored), fuse=True
    )
    assert kinds(graph) == {"rms_normalization": 1, "gelu": 1, "swish": 1, "swiglu": 1}
    net = OnnxModule(graph, ("y",))
    features = {"x": torch.randn(3, 6, generator=torch.Generator().manual_seed(0))}
    write_training_graph(net, tmp_path / "t.onnx")
    found = call(open_session(tmp_path / "t.onnx"), features)
    for name, value in autograd_gradients(net, features).items():
        assert largest_error(found[{"loss": "y"}.get(name, name)], value) < BOUND, name


def test_choices(tmp_path: Path) -> None:
    """Softplus and `nan_to_num`, each written out; the first row has NaN and both infinities."""
    body = (
        "g = MatMul(x, gate)\nb = Mul(g, beta)\ns = Softplus(b)\nd = Div(s, beta)\nc = Greater(b, threshold)\n"
        "p = Where(c, g, d)\nq = Add(p, f)\nn = IsNaN(q)\nv = Where(n, one, q)\nl = Less(q, zero)\ni = IsInf(q)\n"
        "li = And(l, i)\nw = Where(li, zero, v)\nh = Greater(q, zero)\nj = IsInf(q)\nhj = And(h, j)\n"
        "k = Where(hj, one, w)\ny = ReduceMean<keepdims=0>(k)"
    )
    numbers = {"beta": 2.5, "threshold": 1.5, "one": 1.0, "zero": 0.0}
    stored = {"gate": np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)}
    model = parse(
        "float[3,6] x, float[3,1] f",
        "float y",
        body,
        {**stored, **{n: np.float32(v).reshape(()) for n, v in numbers.items()}},
        17,
    )
    graph = make_training_graph(
        model, loss=LossSpec(type="output", prediction="y"), weights_to_train=list(stored), fuse=True
    )
    assert kinds(graph) == {"softplus": 1, "nan_to_num": 1}
    net = OnnxModule(graph, ("y",))
    factors = torch.tensor([[1.0], [-2.0], [float("inf")]])
    features = {"x": 3 * torch.randn(3, 6, generator=torch.Generator().manual_seed(0)), "f": factors}
    write_training_graph(net, tmp_path / "t.onnx")
    found = call(open_session(tmp_path / "t.onnx"), features)
    for name, value in autograd_gradients(net, features).items():
        assert largest_error(found[{"loss": "y"}.get(name, name)], value) < BOUND, name


def test_attention_of_one_head_that_no_axis_stands_for(tmp_path: Path) -> None:
    """The open batch is then the axis of heads of torch's kernel."""
    body = (
        "q = MatMul(x, wq)\nk = MatMul(x, wk)\nt = Transpose<perm=[0,2,1]>(k)\ns = MatMul(q, t)\nm = Mul(s, scale)\n"
        "p = Softmax<axis=-1>(m)\no = MatMul(p, x)\nf = Mul(o, o)\ny = ReduceMean<keepdims=0>(f)"
    )
    rng = np.random.default_rng(0)
    stored = {name: rng.normal(size=(4, 4)).astype(np.float32) for name in ("wq", "wk")}
    model = parse("float[batch,5,4] x", "float y", body, {**stored, "scale": np.float32(0.5).reshape(())}, 17)
    spec = LossSpec(type="output", prediction="y")
    graph = make_training_graph(model, loss=spec, weights_to_train=list(stored), fuse=True)
    assert kinds(graph)["attention"] == 1
    net = OnnxModule(graph, ("y",))
    features = {"x": torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))}
    write_training_graph(net, tmp_path / "t.onnx")
    found = call(open_session(tmp_path / "t.onnx"), features)
    for name, value in autograd_gradients(net, features).items():
        assert largest_error(found[{"loss": "y"}.get(name, name)], value) < BOUND, name


@pytest.mark.slow
def test_gpt2(tmp_path: Path) -> None:
    """Attention, norms, GELU and the chunked loss, with all sizes open."""
    options = {"layers": 1, "heads": 2, "width": 8, "vocab_size": 300, "context_length": 16, "dropout": 0.0}
    spec = LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels")
    graph = make_training_graph(create_model("gpt2", opset=14, **options), loss=spec, fuse=True)
    assert kinds(graph) == {"attention": 1, "layer_normalization": 3, "gelu": 1, "cross_entropy": 1, "linear": 4}
    generator = torch.Generator().manual_seed(0)
    features = {name: torch.randint(0, 300, (2, 6), generator=generator) for name in ("input_ids", "labels")}
    check(OnnxModule(graph, ("loss",)), tmp_path / "t.onnx", features)
