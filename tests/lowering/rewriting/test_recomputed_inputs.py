"""Linear layers that compute norms and activations again: the same bits, and less that is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import onward.graph.shared_inputs as shared_inputs
import onward.lowering.rewriting.linear_layers as linear_layers
from onward.errors import NodeError
from onward.graph.training_graph import make_training_graph
from onward.lowering.building.specialization import specialize
from onward.lowering.module import OnnxModule
from onward.lowering.ops.fused import rms_norm
from onward.lowering.program import Program
from onward.lowering.rewriting.linear_layers import Recipe
from onward.lowering.rewriting.recomputed_inputs import with_linear_layers
from tests.graph.fusion.pairs import parse

B, T, W, V = 2, 3, 4, 6
X_TYPE = f"float[{B},{T},{W}] x"

CHEAP: Mapping[str, tuple[str, int]] = {
    "LayerNormalization": ("y = LayerNormalization<axis=-1>(h, scale, shift)", 18),
    "RMSNormalization": ("y = RMSNormalization<axis=-1>(h, scale)", 23),
    "Gelu": ("y = Gelu(h)", 20),
    "Gelu by tanh": ('y = Gelu<approximate="tanh">(h)', 20),
    "HardSwish": ("y = HardSwish(h)", 18),
    "Mish": ("y = Mish(h)", 18),
    "Swish": ("s = Sigmoid(h)\ny = Mul(h, s)", 18),
    "SwiGLU": ("s = Sigmoid(h)\na = Mul(h, s)\ny = Mul(a, x)", 18),
}

LINEAR: Mapping[str, str] = {
    "product": "z = MatMul(y, w)",
    "product and bias": "p = MatMul(y, w)\nz = Add(p, b)",
    "transposed": "t = Transpose<perm=[1,0]>(wt)\nz = MatMul(y, t)",
    "transposed and bias": "t = Transpose<perm=[1,0]>(wt)\np = MatMul(y, t)\nz = Add(b, p)",
    "Gemm": "f = Reshape(y, rows)\nz = Gemm<transB=1>(f, wt, b)",
    "three readers": "f = MatMul(y, w)\ng = MatMul(y, w2)\nk = Add(f, g)\ni = Relu(k)\np = MatMul(y, w)\nz = Mul(i, p)",
}


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_layers, "LEAST_BYTES", 0)


def stored(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {
        "w": (W, V),
        "w2": (W, V),
        "w3": (W, V // 2),
        "wt": (V, W),
        "b": (V,),
        "scale": (W,),
        "shift": (W,),
        "w0": (W, W),
    }
    drawn = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    return {**drawn, "rows": np.array([-1, W], np.int64)}


def network(body: str, opset: int = 18, result: str = "z", dtype: Any = np.float32) -> OnnxModule:
    """`h = x w0`, then the body; what it reads of `stored` trains."""
    body = f"h = MatMul(x, w0)\n{body}"
    tensors = {
        name: array
        for name, array in stored(dtype).items()
        if name in body.replace("(", " ").replace(")", " ").replace(",", " ").split()
    }
    kind = "double" if dtype is np.float64 else "float"
    model = parse(X_TYPE.replace("float", kind), f"{kind}[s0,s1] {result}", body, tensors, opset)
    return OnnxModule(make_training_graph(model, fuse=True))


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(B, T, W, generator=torch.Generator().manual_seed(1), dtype=dtype).requires_grad_()


def gradients(net: OnnxModule, program: Program) -> tuple[dict[str, Tensor], float]:
    """Result and gradients, and how many bytes of activations are kept for the backward pass, each storage once."""
    x = batch(next(iter(net.weights.values())).dtype)
    weights = {weight.untyped_storage().data_ptr() for weight in net.weights.values()}
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)  # or its place would be taken by another
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        (z,) = program(True, net.device, (x,), net.tensors_by_name())
    shares = torch.randn(z.shape, generator=torch.Generator().manual_seed(2), dtype=z.dtype)
    found = torch.autograd.grad((z * shares).sum(), [x, *net.weights.values()])
    return {"z": z.detach(), **dict(zip(("x", *net.weights), found, strict=True))}, sum(kept.values())


def assert_same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
        assert tensor.stride() == right[name].stride(), name


@pytest.mark.parametrize("linear", LINEAR)
@pytest.mark.parametrize("cheap", CHEAP)
def test_same_bits_and_one_activation_less(cheap: str, linear: str) -> None:
    body, opset = CHEAP[cheap]
    net = network(f"{body}\n{LINEAR[linear]}", opset)
    cheaper = with_linear_layers(net.program, joins=False)
    assert cheaper.code is net.program.code
    plain, kept = gradients(net, net.program)
    found, less = gradients(net, cheaper)
    assert_same(plain, found)
    assert less == kept - 4 * B * T * W


def test_a_small_input_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    net = network(f"{CHEAP['Gelu'][0]}\n{LINEAR['product']}", 20)
    kept = gradients(net, net.program)[1]
    for least, less in ((4 * B * T * W, 4 * B * T * W), (4 * B * T * W + 1, 0)):
        monkeypatch.setattr(linear_layers, "LEAST_BYTES", least)
        assert gradients(net, with_linear_layers(net.program, joins=False))[1] == kept - less


@pytest.mark.parametrize(("outputs", "kept_less"), [(V, 4 * B * T * W), (V + 1, 0)])
@pytest.mark.parametrize("body", ["z = MatMul(y, w)", "f = MatMul(y, w3)\ng = MatMul(y, w3)\nz = Add(f, g)"])
def test_narrow_layers_keep_what_they_read(
    body: str, outputs: int, kept_less: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of V outputs, or two of half as many; where shapes are known."""
    monkeypatch.setattr(shared_inputs, "LEAST_OUTPUTS", {"LayerNormalization": outputs})
    net = network(f"{CHEAP['LayerNormalization'][0]}\n{body}")
    known = specialize(net.program, net.device, (batch(),), net.tensors_by_name(), frozenset())
    plain, kept = gradients(net, known)
    found, less = gradients(net, with_linear_layers(known))
    for name, tensor in plain.items():
        torch.testing.assert_close(found[name], tensor)
    assert kept - less == kept_less


def test_the_gradients_are_those_of_finite_differences() -> None:
    net = network(f"{CHEAP['LayerNormalization'][0]}\n{LINEAR['three readers']}", dtype=np.float64)
    program, names = with_linear_layers(net.program, joins=False), list(net.weights)

    def compute(x: Tensor, *weights: Tensor) -> Tensor:
        return program(True, net.device, (x,), {**net.tensors_by_name(), **dict(zip(names, weights, strict=True))})[0]

    assert torch.autograd.gradcheck(compute, (batch(torch.float64), *net.weights.values()))


def test_attention_is_not_kept_in_two_orders() -> None:
    """The kernel keeps its result by heads; the layer after it reads a copy by tokens."""
    body = (
        "q = Reshape(h, heads)\nqt = Transpose<perm=[0,2,1,3]>(q)\nk = Transpose<perm=[0,2,3,1]>(q)\n"
        "s = MatMul(qt, k)\np = Softmax<axis=-1>(s)\no = MatMul(p, qt)\n"
        "m = Transpose<perm=[0,2,1,3]>(o)\ny = Reshape(m, whole)\nz = MatMul(y, w)"
    )
    tensors = {
        **{name: stored()[name] for name in ("w", "w0")},
        "heads": np.array([0, 0, 2, 2]),
        "whole": np.array([0, 0, W]),
    }
    model = parse(X_TYPE, f"float[{B},{T},{V}] z", f"h = MatMul(x, w0)\n{body}", tensors)
    net = OnnxModule(make_training_graph(model, fuse=True))
    assert [fusion.kind for fusion in net.graph.fusions] == ["attention"]
    plain, kept = gradients(net, net.program)
    found, less = gradients(net, with_linear_layers(net.program, joins=False))
    assert_same(plain, found)
    assert less <= kept


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("y = Gelu(h)\nz = MatMul(y, y2)\n", id="no weight"),
        pytest.param("y = Gelu(h)\np = MatMul(y, w0)\nz = Mul(p, y)", id="kept by another"),
        pytest.param("y = Gelu(h)\nv = Identity(y)\np = MatMul(y, w0)\nz = Mul(p, v)", id="a view is kept by another"),
        pytest.param("y = Relu(h)\nz = MatMul(y, w)", id="keeps its result"),
        pytest.param("y = Gelu(h)\nf = Reshape(y, rows)\nz = Gemm<alpha=2.0>(f, w)", id="scaled"),
    ],
)
def test_what_stays_as_it_is(body: str) -> None:
    body = body.replace("y2", "yt").replace("z = MatMul(y, yt)", "yt = Transpose<perm=[0,2,1]>(h)\nz = MatMul(y, yt)")
    net = network(body, 20)
    assert with_linear_layers(net.program, joins=False) is net.program


def test_a_result_that_is_given_out_is_kept_anyway() -> None:
    net = network("y = Gelu(h)\nz = MatMul(y, w)", 20)
    program = net.program_for(("z", "y"))
    assert with_linear_layers(program, joins=False) is program


@pytest.mark.parametrize("cheap", ["LayerNormalization", "Gelu", "SwiGLU"])
def test_autocast_computes_again_what_it_computed(cheap: str) -> None:
    body, opset = CHEAP[cheap]
    net = network(f"{body}\n{LINEAR['three readers']}", opset)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        plain, kept = gradients(net, net.program)
        found, less = gradients(net, with_linear_layers(net.program, joins=False))
    assert_same(plain, found)
    assert less < kept


def test_one_result_for_all_readers_and_none_left_behind() -> None:
    calls = []

    def code(x: Tensor) -> Tensor:
        calls.append(x)
        return x + 1

    recipe = Recipe(code)
    recipe.readers = 2
    source = torch.zeros(2)
    first = recipe.make([source])
    assert recipe.make([source]) is first
    assert len(calls) == 1
    assert recipe.make([source]) is not first


def test_a_frozen_weight_keeps_nothing() -> None:
    """Without a gradient of the weight, torch keeps no input, and neither may this."""
    net = network("y = Gelu(h)\nz = MatMul(y, w)", 20)
    net.weights["w"].requires_grad_(False)
    kept = []
    for program in (net.program, with_linear_layers(net.program, joins=False)):
        count = []
        with saved_tensors_hooks(
            lambda tensor, count=count: count.append(tensor.shape) or tensor, lambda tensor: tensor
        ):
            program(True, net.device, (batch(),), net.tensors_by_name())
        kept.append(count)
    assert kept[0] == kept[1]


def test_a_backward_pass_can_run_again_but_has_no_gradient_itself() -> None:
    net = network(f"{CHEAP['Gelu'][0]}\n{LINEAR['product and bias']}", 20)
    x = batch()
    (z,) = with_linear_layers(net.program, joins=False)(True, net.device, (x,), net.tensors_by_name())
    weight = net.weights["w"]
    (first,) = torch.autograd.grad(z.square().sum(), weight, retain_graph=True)
    (again,) = torch.autograd.grad(z.square().sum(), weight, retain_graph=True)
    assert torch.equal(first, again)
    with pytest.raises(RuntimeError, match="of Layers has no second derivative"):
        torch.autograd.grad(z.sum(), weight, create_graph=True)


def test_a_failing_node_is_named_as_ever() -> None:
    net = network("y = Gelu(h)\nz = MatMul(y, w)", 20)
    tensors = {**net.tensors_by_name(), "w": torch.zeros(W + 1, V, requires_grad=True)}
    with pytest.raises(
        NodeError, match=rf"MatMul\) failed on inputs \(\[{B}, {T}, {W}\] float32, \[{W + 1}, {V}\] float32\)"
    ):
        with_linear_layers(net.program, joins=False)(True, net.device, (batch(),), tensors)


@pytest.mark.parametrize("shape", [(W,), (T, W), (B, T, W)])
def test_rms_norm_differentiates_as_torch_does(shape: tuple[int, ...]) -> None:
    """In float64, to 1e-14 and 1e-12 of torch's own formula, which it writes out in five operators on a CPU."""
    x, scale = batch(torch.float64), torch.randn(shape, dtype=torch.float64).requires_grad_()
    shares = torch.randn(B, T, W, dtype=torch.float64)
    found, expected = rms_norm(x, shape, scale, 1e-5), F.rms_norm(x, shape, scale, 1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    pairs = zip(*(torch.autograd.grad((y * shares).sum(), (x, scale)) for y in (found, expected)), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    kept = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda tensor: tensor):
        rms_norm(x, shape, scale, 1e-5)
    assert kept == [x.shape, scale.shape, (*x.shape[: -scale.dim()], *[1] * scale.dim())]
