"""What follows a batch normalization is recomputed for the backward pass: the same bits, and less that is kept."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import onward.lowering.kernels.rematerialize as rematerialize
from onward.engine.forecast.allocations import Allocations
from onward.graph.training_graph import make_training_graph
from onward.lowering.kernels import layout
from onward.lowering.kernels.rematerialize import Rematerialization, with_rematerialization
from onward.lowering.module import OnnxModule
from onward.lowering.program import Program
from tests.graph.fusion.pairs import parse

N, C, S = 2, 4, 6
WHOLE = 4 * N * C * S * S
"""Bytes of an activation."""

NORM = "BatchNormalization"
# What it is -> (the graph between the first convolution h and z, activations less)
BODIES: Mapping[str, tuple[str, int]] = {
    "convolution": (f"n = {NORM}(h, s, o, m, v)\ny = Relu(n)\nz = Conv<pads=[1,1,1,1]>(y, k)", 1),
    "a pixel": (f"n = {NORM}(h, s, o, m, v)\ny = Relu(n)\nz = Conv(y, p)", 1),
    "two readers": (
        f"n = {NORM}(h, s, o, m, v)\ny = Relu(n)\na = Conv(y, p)\nb = Conv<pads=[1,1,1,1]>(y, k)\nz = Add(a, b)",
        1,
    ),
    "no activation": (f"n = {NORM}(h, s, o, m, v)\nz = Conv(n, p)", 1),
    "relu6": (f"n = {NORM}(h, s, o, m, v)\ny = Clip(n, low, high)\nz = Conv(y, p)", 2),
    "hard swish": (f"n = {NORM}(h, s, o, m, v)\ny = HardSwish(n)\nz = Conv(y, p)", 2),
    "swish": (f"n = {NORM}(h, s, o, m, v)\ng = Sigmoid(n)\ny = Mul(n, g)\nz = Conv(y, p)", 2),
    "shortcut": (f"n = {NORM}(h, s, o, m, v)\nr = Relu(h)\nt = Add(r, n)\ny = Relu(t)\nz = Conv(y, p)", 1),
    "two norms": (
        f"n = {NORM}(h, s, o, m, v)\nc = Conv(h, p)\nw = {NORM}(c, s, o, m, v)\nt = Add(n, w)\n"
        "y = Relu(t)\nz = Conv(y, p)",
        1,
    ),
    "chain": (
        f"n = {NORM}(h, s, o, m, v)\na = Relu(n)\nc = Conv(a, p)\nw = {NORM}(c, s, o, m, v)\nt = Add(w, a)\n"
        f"b = Relu(t)\nd = Conv(b, p)\nx2 = {NORM}(d, s, o, m, v)\nu = Add(b, x2)\ne = Relu(u)\nz = Conv(e, p)",
        3,
    ),
    "pooled": (f"n = {NORM}(h, s, o, m, v)\ny = Relu(n)\nz = MaxPool<kernel_shape=[2,2],strides=[2,2]>(y)", 1),
    "averages": (f"n = {NORM}(h, s, o, m, v)\ny = Relu(n)\nz = AveragePool<kernel_shape=[2,2],strides=[2,2]>(y)", 1),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rematerialize, "LEAST_BYTES", 0)


def network(body: str, dtype: Any = np.float32) -> OnnxModule:
    rng = np.random.default_rng(0)
    shapes = {"k0": (C, C, 3, 3), "k": (C, C, 3, 3), "p": (C, C, 1, 1), "s": (C,), "o": (C,), "one": (1, C, S, S)}
    drawn = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    drawn |= {"m": np.zeros(C, dtype), "v": np.ones(C, dtype), "low": np.array(0, dtype), "high": np.array(1, dtype)}
    body = f"h = Conv<pads=[1,1,1,1]>(x, k0)\n{body}"
    words = body.replace("(", " ").replace(")", " ").replace(",", " ").split()
    kind = "double" if dtype is np.float64 else "float"
    tensors = {name: array for name, array in drawn.items() if name in words}
    model = parse(f"{kind}[{N},{C},{S},{S}] x", f"{kind}[a0,a1,a2,a3] z", body, tensors, 18)
    return OnnxModule(make_training_graph(model, fuse=True))


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    plain = torch.randn(N, C, S, S, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return plain.contiguous(memory_format=torch.channels_last).requires_grad_()


def compute(net: OnnxModule, program: Program) -> tuple[dict[str, Tensor], float]:
    """Result, gradients and running statistics from fresh ones, and how many bytes the backward pass has kept."""
    for name, start in (("m", 0.0), ("v", 1.0)):
        net.tensors_by_name()[name].fill_(start)
    x = images(next(iter(net.weights.values())).dtype)
    gc.collect()
    with Allocations() as log:
        (z,) = program(True, net.device, (x,), net.tensors_by_name())
        kept = sum(log.alive(log.now).values())
    shares = torch.randn(z.shape, generator=torch.Generator().manual_seed(2), dtype=z.dtype)
    found = torch.autograd.grad((z * shares).sum(), [x, *net.weights.values()])
    states = {name: net.tensors_by_name()[name].clone() for name in ("m", "v")}
    return {"z": z.detach(), **states, **dict(zip(("x", *net.weights), found, strict=True))}, kept


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("body", BODIES)
def test_same_bits_and_fewer_activations(body: str, dtype: Any) -> None:
    text, count = BODIES[body]
    net = network(text, dtype)
    plain, kept = compute(net, net.program)
    found, less = compute(net, with_rematerialization(net.program))
    assert plain.keys() == found.keys()
    for name, tensor in plain.items():
        assert torch.equal(tensor, found[name]), name
        assert tensor.stride() == found[name].stride(), name
    assert (kept - less) / WHOLE / (2 if dtype is np.float64 else 1) == pytest.approx(count, abs=0.1)


def test_autocast_makes_again_what_it_made() -> None:
    net = network(BODIES["chain"][0])
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        plain, kept = compute(net, net.program)
        found, less = compute(net, with_rematerialization(net.program))
    assert less < kept
    for name, tensor in plain.items():
        assert torch.equal(tensor, found[name]), name


def test_nothing_is_left_behind_and_nothing_holds_itself() -> None:
    net = network(BODIES["chain"][0])
    program, x = with_rematerialization(net.program), images()
    gc.collect()
    gc.disable()
    try:
        with Allocations() as log:
            (z,) = program(True, net.device, (x,), net.tensors_by_name())
            assert sum(log.alive(log.now).values()) > WHOLE
            found = torch.autograd.grad(z.sum(), list(net.weights.values()))
            del z, found
            assert sum(log.alive(log.now).values()) < WHOLE / 8  # what the model itself holds
    finally:
        gc.enable()


def test_a_pass_that_keeps_its_graph_can_run_again_but_has_no_gradient_itself() -> None:
    net = network(BODIES["chain"][0])
    weights = list(net.weights.values())
    (z,) = with_rematerialization(net.program)(True, net.device, (images(),), net.tensors_by_name())
    first = torch.autograd.grad(z.square().sum(), weights, retain_graph=True)
    for one, weight in zip(first, weights, strict=True):  # as schedules do that split the pass
        assert torch.equal(one, torch.autograd.grad(z.square().sum(), weight, retain_graph=True)[0])
    with pytest.raises(RuntimeError, match=r"set `recompute\.cheap_activations: false` to take gradients of gradients"):
        torch.autograd.grad(z.square().sum(), weights, create_graph=True)


def test_frozen_weights_keep_no_promise() -> None:
    net = network(BODIES["two readers"][0])
    for name in ("p", "k"):
        net.weights[name].requires_grad_(False)
    (z,) = with_rematerialization(net.program)(True, net.device, (images(),), net.tensors_by_name())
    trained = [weight for weight in net.weights.values() if weight.requires_grad]
    (plain,) = net.program(True, net.device, (images(),), net.tensors_by_name())
    pairs = zip(torch.autograd.grad(z.sum(), trained), torch.autograd.grad(plain.sum(), trained), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("operands", ["n, r", "r, n"])
def test_a_sum_with_one_image_for_all_is_kept(operands: str) -> None:
    """What is normalized here is smaller than the sum, which has the same strides."""
    net = network(
        f"r = Relu(h)\nn = {NORM}(one, s, o, m, v)\nt = Add({operands})\ny = Relu(t)\nz = Conv(y, p)", np.float64
    )
    found = []
    for program in (net.program, with_rematerialization(net.program)):
        x = images(torch.float64).detach().contiguous()
        (z,) = program(True, net.device, (x,), net.tensors_by_name())
        found.append(torch.autograd.grad(z.square().sum(), list(net.weights.values())))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_images_that_come_in_another_layout_are_turned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MOST_SMALL_PIXELS", 0)
    net = network(f"n = {NORM}(h, s, o, m, v)\nz = Relu(n)")
    x = images().detach().contiguous()

    def kept(program: Program) -> float:
        with Allocations() as log:
            results = program(True, net.device, (x,), net.tensors_by_name())
            assert results[0].requires_grad
            return sum(log.alive(log.now).values())

    assert kept(net.program) - kept(with_rematerialization(net.program)) == pytest.approx(WHOLE, rel=0.1)


def test_one_for_all_to_whom_it_was_promised_and_the_first_while_it_lives() -> None:
    calls = []

    def make() -> Tensor:
        calls.append(0)
        return torch.ones(2)

    tensor = torch.zeros(2)
    how = Rematerialization(make)
    how.stand_for(tensor)
    how.promise()
    how.promise()
    how.promise()
    with torch.no_grad():
        assert torch.equal(how.take(), torch.zeros(2))
        del tensor
        assert torch.equal(how.take(), torch.ones(2))
        assert torch.equal(how.take(), torch.ones(2))
        assert len(calls) == 1
        how.take()
    assert len(calls) == 2


def test_a_long_chain_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    net = network(BODIES["chain"][0])
    kept = compute(net, net.program)[1]
    monkeypatch.setattr(rematerialize, "LONGEST_CHAIN", 1)
    assert (kept - compute(net, with_rematerialization(net.program))[1]) / WHOLE == pytest.approx(2, abs=0.1)
