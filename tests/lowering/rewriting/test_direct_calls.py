"""Direct calls give the bits of the calls that they replace, values and gradients; what may be recomputed stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import onward.lowering.kernels.rematerialize as rematerialize
import onward.lowering.rewriting.linear_layers as linear_layers
from onward.graph.training_graph import make_training_graph
from onward.lowering.building.specialization import specialize
from onward.lowering.module import OnnxModule
from onward.lowering.program import Program
from onward.lowering.rewriting.direct_calls import with_direct_calls
from onward.lowering.rewriting.recomputed_inputs import with_linear_layers
from tests.graph.fusion.pairs import parse

W = 8
STORED: dict[str, Any] = {
    "scale": (W,), "bias": (W,), "one": (1,), "wq": (W, W), "wk": (W, W), "bq": (W,), "wt": (5, W), "bt": (5,),
}  # fmt: skip
BLOCK = """
n = LayerNormalization<axis=-1>(x, scale, bias)
a = MatMul(n, wq)
q = Add(a, bq)
k = MatMul(n, wk)
s = Sub(q, k)
u, v = Split<axis=-1, num_outputs=2>(s)
m = Mul(u, v)
r = Relu(m)
g = Gelu<approximate="tanh">(r)
t = Transpose<perm=[0,2,1]>(g)
f = Reshape(t, eight)
d = Div(f, bq)
z = Gemm<transB=1>(d, wt, bt)
"""
MOVED = """
h = Constant<value_float=2.0>()
o = Sub(h, x)
p = Mul(o, h)
c = Cast<to=1>(p)
y = Concat<axis=1>(c, x)
zero = Constant<value_ints=[0]>()
low = Constant<value_ints=[2]>()
high = Constant<value_ints=[-1]>()
axis = Constant<value_ints=[1]>()
far = Constant<value_ints=[99]>()
w = Slice(y, low, high, axis)
v = Slice(w, axis, far, axis)
same = Slice(v, zero, far, axis)
above = Greater(same, bias)
z = Where(above, same, bias)
"""
STAYS = {
    "a scale that broadcasts": ("z = LayerNormalization<axis=-1>(x, one)", "layer_normalization"),
    "a slice backwards": (
        "f = Constant<value_ints=[9]>()\nt = Constant<value_ints=[-99]>()\n"
        "a = Constant<value_ints=[1]>()\ns = Constant<value_ints=[-1]>()\nz = Slice(x, f, t, a, s)",
        "slice_",
    ),
    "a cast to another type": ("w = Cast<to=11>(x)\nz = Cast<to=1>(w)", "cast"),
    "two outputs": ("z, mean = LayerNormalization<axis=-1>(x, scale)\ne = Add(mean, mean)", "layer_normalization"),
    "a scaled Gemm": ("f = Reshape(x, eight)\nz = Gemm<transB=1, alpha=0.5>(f, wt, bt)", "gemm"),
}


def network(body: str) -> OnnxModule:
    rng = np.random.default_rng(0)
    stored: dict[str, Any] = {name: rng.normal(size=size).astype(np.float32) for name, size in STORED.items()}
    stored["eight"] = np.array([-1, W])
    stored["wide"] = rng.normal(size=(W, 3 * W)).astype(np.float32)
    stored |= {"heads": np.array([2, 6, 2, -1]), "joined": np.array([2, 6, -1])}
    words = body.replace("(", " ").replace(")", " ").replace(",", " ").split()
    tensors = {name: array for name, array in stored.items() if name in words}
    model = parse(f"float[b,6,{W}] x", "float[m,p] z" if "Gemm" in body else "float[b,m,p] z", body, tensors, 20)
    return OnnxModule(make_training_graph(model, fuse=True))


def specialized(net: OnnxModule) -> Program:
    return direct_twin(net, (2, 6, W))[0]


def direct_twin(net: OnnxModule, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Program, Program]:
    """The program for an input of this shape, and the same with direct calls."""
    tensors = net.tensors_by_name()
    constants = frozenset(tensors.keys() - net.weights.keys())
    before = specialize(net.program, torch.device("cpu"), (torch.zeros(shape, dtype=dtype),), tensors, constants)
    return before, with_direct_calls(before)


def called(program: Program) -> list[str]:
    code: Any = program.run or program.code
    return [node.target.__name__ for node in code.graph.nodes if node.op == "call_function"]


def same_bits(net: OnnxModule, before: Program, program: Program, shape: tuple[int, ...]) -> None:
    """Both give the same, values and gradients."""
    for one, other in zip(results(net, program, shape), results(net, before, shape), strict=True):
        assert torch.equal(one, other)


def results(net: OnnxModule, program: Program, shape: tuple[int, ...] = (2, 6, W)) -> list[torch.Tensor]:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    (z,) = program(True, torch.device("cpu"), (x,), net.tensors_by_name())
    return [z, *torch.autograd.grad(z.square().sum(), [x, *net.weights.values()])]


@pytest.mark.parametrize("joins", [False, True])
def test_values_and_gradients_have_the_same_bits(joins: bool) -> None:
    net = network(BLOCK)
    before = specialized(net)
    program = with_direct_calls(with_linear_layers(before) if joins else before)
    same_bits(net, before, program, (2, 6, W))
    direct = called(program)
    assert {"_norm_alone", "linear", "_linear_of_columns", "matmul", "sub", "mul"} <= {*direct}
    assert {"relu", "gelu", "permute", "reshape", "split_with_sizes", "true_divide"} <= {*direct}
    assert not {"layer_normalization", "linear_layers", "transpose", "pick", "split"} & {*direct}
    assert called(before)[0] == "layer_normalization"  # its code is left as it is


def test_what_moves_tensors_or_takes_numbers_has_the_same_bits() -> None:
    net = network(MOVED)
    before = specialized(net)
    program = with_direct_calls(before)
    same_bits(net, before, program, (2, 6, W))
    direct = called(program)
    assert direct == ["sub", "mul", "identity", "cat", "narrow", "narrow", "identity", "call", "where"]


HEADS = """
n = MatMul(x, wide)
q, k, v = Split<axis=-1, num_outputs=3>(n)
qh = Reshape(q, heads)
kh = Reshape(k, heads)
vh = Reshape(v, heads)
qt = Transpose<perm=[0,2,1,3]>(qh)
kt = Transpose<perm=[0,2,3,1]>(kh)
s = MatMul(qt, kt)
vt = Transpose<perm=[0,2,1,3]>(vh)
o = MatMul(s, vt)
ot = Transpose<perm=[0,2,1,3]>(o)
z = Reshape(ot, joined)
"""


@pytest.mark.parametrize("case", ["queries, keys and values", "one that is read as it is", "parts of two sizes"])
def test_parts_that_become_heads_are_one_view(case: str) -> None:
    body = HEADS
    if case == "one that is read as it is":
        body = HEADS.replace("z = Reshape(ot, joined)", "w = Reshape(ot, joined)\nz = Mul(w, q)")
    if case == "parts of two sizes":
        sizes = "sizes = Constant<value_ints=[6, 6, 12]>()"
        body = f"{sizes}\n{HEADS}".replace("<axis=-1, num_outputs=3>(n)", "<axis=-1>(n, sizes)").replace(
            "z = Reshape(ot, joined)", "w = Reshape(ot, joined)\nz = Add(w, w)"
        )
    net = network(body)
    before = specialized(net)
    program = with_direct_calls(before)
    same_bits(net, before, program, (2, 6, W))
    assert ("unbind" in called(program)) is (case == "queries, keys and values")


@pytest.mark.parametrize("case", STAYS, ids=list(STAYS))
def test_a_call_that_decides_at_each_pass_stays(case: str) -> None:
    body, name = STAYS[case]
    net = network(body)
    before = specialized(net)
    program = with_direct_calls(before)
    nodes = (program.run or program.code).graph.nodes  # type: ignore[union-attr]
    assert name in [getattr(n.target, "__name__", "") for n in nodes if n.op == "call_function"]
    same_bits(net, before, program, (2, 6, W))


def test_what_may_be_recomputed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations, sums and layers of inputs that are large enough."""
    monkeypatch.setattr(rematerialize, "LEAST_BYTES", 0)
    monkeypatch.setattr(linear_layers, "LEAST_BYTES", 0)
    program = with_direct_calls(with_linear_layers(specialized(network(BLOCK))))
    code: Any = program.run
    modules = [n.target.__module__ for n in code.graph.nodes if getattr(n.target, "__name__", "") in ("relu", "gelu")]
    assert set(modules) == {"onward.lowering.ops.activation"}
    assert "checked_layers" in called(program)


def test_a_program_for_any_shapes_is_left_as_it_is() -> None:
    """Nothing is known of its tensors."""
    net = network("z = LayerNormalization<axis=-1>(x, scale, bias)")
    program = with_direct_calls(net.program)
    assert "layer_normalization" in called(program)
