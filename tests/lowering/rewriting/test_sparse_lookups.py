"""Lookups in a table that the last layer reads, too: the same gradient, and no second table of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from onward.engine.forecast.allocations import Allocations
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from onward.lowering.ops import fused_cross_entropy
from onward.lowering.program import Program
from onward.lowering.rewriting import sparse_lookups
from onward.lowering.rewriting.sparse_lookups import lookup, split_table, with_sparse_lookups
from tests.graph.fusion.pairs import parse

B, T, W, V = 2, 5, 8, 2048
LOSS = LossSpec(type="softmax_cross_entropy", prediction="z", label="labels")


def network(head: str, dtype: Any = np.float64) -> OnnxModule:
    """A lookup in `table`, a function of it, and a last layer of V classes."""
    rng = np.random.default_rng(0)
    tensors = {"table": rng.normal(size=(V, W)).astype(dtype), "other": rng.normal(size=(W, V)).astype(dtype)}
    kind = "double" if dtype is np.float64 else "float"
    body = f"x = Gather(table, ids)\nh = Tanh(x)\n{head}"
    named = {name: array for name, array in tensors.items() if name in body}
    model = parse(f"int64[{B},{T}] ids", f"{kind}[{B},{T},{V}] z", body, named, 18)
    graph = make_training_graph(model, loss=LOSS, fuse=True)
    return OnnxModule(graph, (str(graph.loss),))


TIED = "t = Transpose<perm=[1,0]>(table)\nz = MatMul(h, t)"
UNTIED = "z = MatMul(h, other)"


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(-V, V, (B, T), generator=generator), torch.randint(0, V, (B, T), generator=generator)
    ids[0, :3] = 7  # a row that is looked up more than once
    return {"ids": ids, "labels": labels}


def loss_of(net: OnnxModule, program: Program) -> Tensor:
    inputs = tuple(batch()[name] for name in program.inputs)
    loss: Tensor = program(True, net.device, inputs, net.tensors_by_name())[0]
    return loss


def sparse_of(net: OnnxModule) -> Program:
    program = with_sparse_lookups(net.program)
    assert sum(node.target is lookup for node in program.code.graph.nodes) == 1
    return program


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("dtype", "bound"), [(np.float64, 1e-15), (np.float32, 1e-7)])
def test_the_gradient_is_the_same_dense_one(dtype: Any, bound: float) -> None:
    net = network(TIED, dtype)
    (expected,) = torch.autograd.grad(loss_of(net, net.program), list(net.weights.values()))
    weight, program = net.weights["table"], sparse_of(net)
    for count in (1, 2):  # the second is added to the first
        loss_of(net, program).backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        assert weight.grad.layout is torch.strided
        torch.testing.assert_close(weight.grad, count * expected, rtol=0, atol=count * bound)
    again = torch.autograd.grad(loss_of(net, program), weight)[0]
    assert torch.equal(again, torch.autograd.grad(loss_of(net, program), weight)[0])


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_lookups, "LEAST_BYTES", 0)
    monkeypatch.setattr(fused_cross_entropy, "SMALL_BYTES", 0)


def test_a_small_table_has_a_dense_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    table, ids = torch.randn(V, W, requires_grad=True), batch()["ids"]
    layouts = []
    for least in (table.nbytes, table.nbytes + 1):
        monkeypatch.setattr(sparse_lookups, "LEAST_BYTES", least)
        layouts.append(torch.autograd.grad(lookup(table, ids).sum(), table)[0].layout)
    assert layouts == [torch.sparse_coo, torch.strided]


def test_no_second_table_is_made() -> None:
    net, whole = network(TIED), V * W * 8

    def peak(program: Program) -> float:
        loss = loss_of(net, program)  # logits and the last layer's gradient are there now
        with Allocations() as log:
            loss.backward()  # type: ignore[no-untyped-call]
            found = sum(log.peak(0, log.now).values())
        net.weights["table"].grad = None
        return found

    assert peak(net.program) - peak(sparse_of(net)) >= 0.9 * whole


@pytest.mark.parametrize("head", [TIED, "x2 = Gather(table, ids)\ny = Add(h, x2)\n" + TIED.replace("(h,", "(y,")])
def test_the_sum_of_both_gradients_is_in_the_memory_of_the_last_layer_s(head: str) -> None:
    """At most one table of gradients is alive in the backward pass; autograd's own sum would be a second one."""
    net, whole = network(head), V * W * 8
    program = with_sparse_lookups(net.program)
    (expected,) = torch.autograd.grad(loss_of(net, net.program), [net.weights["table"]])
    with Allocations() as log:
        log.note(net.weights["table"].detach())
        loss = loss_of(net, program)
        start = log.now
        loss.backward()  # type: ignore[no-untyped-call]
        assert sum(log.peak(start, log.now).values()) < 2.5 * whole  # the weight is one of them
    gradient = net.weights["table"].grad
    assert gradient is not None
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-15)


def test_a_table_read_by_the_last_layer_alone_has_its_gradient_when_lookups_are_left_out() -> None:
    table = torch.randn(V, W, requires_grad=True)
    for chosen in range(2):
        part = split_table(table)[chosen]
        assert part.data_ptr() == table.data_ptr()
        assert torch.equal(torch.autograd.grad((part * 3).sum(), table)[0], torch.full((V, W), 3.0))


def test_a_table_of_its_own_has_a_dense_gradient() -> None:
    net = network(UNTIED)
    assert with_sparse_lookups(net.program) is net.program


def test_a_copy_in_16_bits_has_a_dense_gradient() -> None:
    """What casts the weight takes no sparse one."""
    net = network(TIED, np.float32)
    low = net.weights["table"].to(torch.bfloat16)
    rows = lookup(low, batch()["ids"])
    assert rows.dtype == torch.bfloat16
    (of_table,) = torch.autograd.grad(rows.float().sum(), net.weights["table"])
    assert of_table.layout is torch.strided


def test_a_frozen_table_has_no_gradient() -> None:
    table = torch.randn(V, W)
    assert not lookup(table, batch()["ids"]).requires_grad
    assert torch.equal(lookup(table, batch()["ids"]), table[batch()["ids"]])
    assert torch.equal(lookup(table, (3, -1)), table[[3, -1]])


@pytest.mark.parametrize("accumulates", [False, True])
def test_without_a_gradient_of_the_last_layer_it_is_dense(accumulates: bool) -> None:
    """Where a loss of other values is differentiated, optimizers and clipping get what they know."""
    table, ids = torch.randn(V, W, dtype=torch.float64, requires_grad=True), batch()["ids"]
    first, _ = split_table(table)
    expected = torch.zeros(V, W, dtype=torch.float64)
    expected.index_add_(0, ids.flatten() % V, torch.ones(ids.numel(), W, dtype=torch.float64))
    if accumulates:
        table.grad = torch.ones_like(table)
    lookup(first, ids).sum().backward()  # type: ignore[no-untyped-call]
    assert table.grad is not None
    assert table.grad.layout is torch.strided
    assert torch.equal(table.grad, expected + int(accumulates))
    assert torch.nn.utils.clip_grad_norm_([table], 1e9) == pytest.approx(float((expected + int(accumulates)).norm()))


@pytest.mark.parametrize("loss", ["both", "lookups alone", "last layer alone"])
def test_a_second_loss_of_what_was_looked_up(loss: str) -> None:
    """Any part of the graph may be what is differentiated."""
    net = network(TIED)
    weight, program = net.weights["table"], sparse_of(net)
    rows = [node for node in program.code.graph.nodes if node.target is lookup]
    assert len(rows) == 1
    results = []
    for sparse in (True, False):
        first, second = split_table(weight) if sparse else (weight, weight)
        x = lookup(first, batch()["ids"]) if sparse else weight[batch()["ids"]]
        scores = (x.tanh() @ second.T).logsumexp(-1).sum()
        total = {"both": scores + x.square().sum(), "lookups alone": x.square().sum()}.get(loss, scores)
        if loss == "last layer alone":
            total = (second * 2).square().sum()
        results.append(torch.autograd.grad(total, weight)[0])
    assert results[0].layout is torch.strided
    torch.testing.assert_close(results[0], results[1], rtol=1e-14, atol=1e-13)
