"""Mixtures of experts become one node with the same values and gradients (1e-10), in every form that is exported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from onward.graph.training_graph import make_training_graph
from tests.graph.fusion.pairs import assert_close, both, kinds, parse, run, specialized
from tests.graph.mixtures import MIXTURES, Mixture, exported

RNG = np.random.default_rng(0)
E, D, H = 3, 4, 5
STORED = {"router": RNG.normal(size=(D, E)), "up": RNG.normal(size=(E, D, H)), "down": RNG.normal(size=(E, H, D))}
NUMBERS = {"k": np.array([2]), "last": np.array([-1]), **{f"n{e}": np.array(e) for e in range(E)}}
NUMBERS["numbers"] = np.arange(E)
NUMBERS |= {f"{name}{e}": STORED[name][e] for name in ("up", "down") for e in range(E)} | {"zero": np.zeros(1)}
ROUTED = "logits = MatMul(x, router)\nshares = Softmax(logits)\nbest, chosen = TopK(shares, k)\n"
LOOP = ROUTED + "".join(
    f"m{e} = Equal(chosen, n{e})\nw{e} = Where(m{e}, best, zero)\ng{e} = ReduceSum(w{e}, last)\n"
    f"h{e} = MatMul(x, up{e})\na{e} = Relu(h{e})\no{e} = MatMul(a{e}, down{e})\nt{e} = Mul(g{e}, o{e})\n"
    for e in range(E)
)
SUM = "s = Add(t0, t1)\ny = Add(s, t2)"
STACK = ROUTED + (
    "sizes = Shape(shares)\nzeros = Expand(zero, sizes)\ng = ScatterElements<axis=-1>(zeros, chosen, best)\n"
    'h = Einsum<equation="bnd,edf->bnef">(x, up)\na = Relu(h)\ny = Einsum<equation="bnef,efd,bne->bnd">(a, down, g)'
)


def model(body: str, outputs: str = f"double[b,n,{D}] y") -> onnx.ModelProto:
    words = body.replace("(", " ").replace(")", " ").replace(",", " ").split()
    stored = {name: value for name, value in {**STORED, **NUMBERS}.items() if name in words}
    return parse(f"double[b,n,{D}] x", outputs, body, stored)


def tokens(*shape: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}


def zeros_of(proto: onnx.ModelProto) -> list[str]:
    return [tensor.name for tensor in proto.graph.initializer if tensor.name == "zero"]


def assert_equal(proto: onnx.ModelProto, inputs: dict[str, torch.Tensor], count: int = 1) -> None:
    plain, fused = both(proto, weights_not_to_train=zeros_of(proto))
    assert kinds(fused.graph).get("experts", 0) == count, kinds(fused.graph)
    wanted, of_plain = run(plain, plain, inputs)
    program = specialized(fused, inputs)

    def call(**given: torch.Tensor) -> object:
        return program(fused.training, fused.device, [given[n] for n in program.inputs], fused.tensors_by_name())

    for way in (fused, call):
        found, gradients = run(way, fused, inputs)
        for left, right in zip(wanted, found, strict=True):
            assert_close(left, right)
        assert gradients.keys() == of_plain.keys()
        for name, gradient in of_plain.items():
            assert_close(gradient, gradients[name])


QUICK = ("Selected",)  # a loop over rows is exported by docs/howto/mixtures-of-experts.md


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[] if k.__name__ in QUICK else pytest.mark.slow, id=k.__name__) for k in MIXTURES],
)
def test_exports(tmp_path: Path, kind: type[Mixture]) -> None:
    path = exported(kind, tmp_path / "m.onnx")
    assert_equal(onnx.load(path), tokens(3, 6, 8))
    assert kinds(make_training_graph(path, fuse=True, fusions_off=("experts",))).get("experts") is None


def test_what_the_router_gives_elsewhere_stays() -> None:
    """Losses that balance the experts read the probabilities and the masks."""
    more = "\nload = ReduceMean(c0, last)\nc0 = Cast<to=11>(m0)"
    body = LOOP + SUM + "\n".join(["", *more.splitlines()[::-1]])
    assert_equal(model(body, f"double[b,n,{D}] y, double[b,n,{E}] shares, double[b,n,1] load"), tokens(2, 3, D))


def test_the_only_choice_of_every_token_has_no_axis_of_its_own() -> None:
    """Its weights gathered, for any number of tokens, with a Max of one operand as torch's exporter writes it."""
    body = """logits = MatMul(x, router)
shares = Softmax(logits)
best, chosen = TopK(shares, one)
flat = Reshape(chosen, last)
same = Max(flat)
places = Unsqueeze(same, last)
u = GatherND(up, places)
d = GatherND(down, places)
row = Unsqueeze(x, one)
h = MatMul(row, u)
a = Relu(h)
o = MatMul(a, d)
result = Squeeze(o, one)
share = Reshape(best, column)
t = Mul(result, share)
choices = Reshape(t, rows)
y = ReduceSum<keepdims=0>(choices, one)"""
    sizes = {"one": [1], "last": [-1], "column": [-1, 1], "rows": [-1, 1, D]}
    stored = {**STORED, **{name: np.array(value) for name, value in sizes.items()}}
    assert_equal(parse(f"double[n,{D}] x", f"double[n,{D}] y", body, stored), tokens(7, D))


TWICE = LOOP
for e in range(E):
    TWICE = TWICE.replace(f"h{e} = MatMul(x, ", f"x{e} = Mul(x, g{e})\nh{e} = MatMul(x{e}, ")

OTHERS = {
    "an expert that is read elsewhere": (LOOP + SUM, f"double[b,n,{D}] y, double[b,n,{D}] o1"),
    "an expert that is left out": (LOOP + "y = Add(t0, t1)", f"double[b,n,{D}] y"),
    "an expert that counts twice": (LOOP + "s = Add(t0, t1)\nr = Add(s, t2)\ny = Add(r, t1)", f"double[b,n,{D}] y"),
    "an expert with another activation": (LOOP.replace("Relu(h1)", "Tanh(h1)") + SUM, f"double[b,n,{D}] y"),
    "two experts of one weight": (LOOP.replace("up1)", "up0)") + SUM, f"double[b,n,{D}] y"),
    "experts of other tokens": (LOOP.replace("MatMul(x, up1)", "MatMul(best4, up1)").replace(
        "m0 =", "best4 = Tanh(x)\nm0 =", 1) + SUM, f"double[b,n,{D}] y"),
    "the gate of another": (LOOP.replace("Mul(g1, o1)", "Mul(g0, o1)") + SUM, f"double[b,n,{D}] y"),
    "tokens and results weighed": (TWICE + SUM, f"double[b,n,{D}] y"),
    "numbers of experts as booleans": (
        LOOP.replace("Equal(chosen, n1)", "Equal(narrow, n1)").replace(
            "m1 =", "whether = Cast<to=9>(chosen)\nnarrow = Cast<to=7>(whether)\nm1 =") + SUM, f"double[b,n,{D}] y"
    ),
    "shares added to minus infinity": (
        STACK.replace("Expand(zero, sizes)", "Expand(lowest, sizes)").replace("<axis=-1>", '<axis=-1, reduction="add">')
        .replace("sizes =", "low = Constant<value_float=-1e38>()\nlowest = CastLike(low, best)\nsizes =")
        .replace("g = ", "scores = ").replace("h = ", "g = Softmax(scores)\nh = "), f"double[b,n,{D}] y",
    ),
    "shares that are multiplied with zeros": (
        STACK.replace("axis=-1>(zeros", 'axis=-1, reduction="mul">(zeros'), f"double[b,n,{D}] y"
    ),
    "all experts for all tokens": (
        "logits = MatMul(x, router)\ng = Softmax(logits)\nh = Einsum<equation=\"bnd,edf->bnef\">(x, up)\na = Relu(h)\n"
        "y = Einsum<equation=\"bnef,efd,bne->bnd\">(a, down, g)", f"double[b,n,{D}] y",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS, ids=list(OTHERS))
def test_what_is_no_mixture_stays(name: str) -> None:
    body, outputs = OTHERS[name]
    proto = model(body, outputs)
    assert kinds(make_training_graph(proto, fuse=True, weights_not_to_train=zeros_of(proto))).get("experts") is None


def test_what_these_are_made_of_is_one() -> None:
    assert_equal(model(LOOP + SUM), tokens(2, 3, D))
    assert_equal(model(STACK), tokens(2, 3, D))
    assert kinds(make_training_graph(model(LOOP + SUM), fuse=True, keep=("o1",))).get("experts") is None
