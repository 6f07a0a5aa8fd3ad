"""Direct losses and lookups give the bits of the lowering, and what torch refuses is answered by the lowering."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import fx

import onward.lowering.rewriting.sparse_lookups as sparse_lookups
from onward.graph.training_graph import make_training_graph
from onward.lowering.building.tensor_facts import FACT, TensorFact
from onward.lowering.module import OnnxModule
from onward.lowering.ops.fused_cross_entropy import linear_cross_entropy
from onward.lowering.program import Program
from onward.lowering.rewriting import direct_losses
from tests.graph.fusion.pairs import parse
from tests.lowering.rewriting.test_direct_calls import called, direct_twin

N, V, W = 6, 5, 8


def program_and_twin(body: str, inputs: str, tensors: dict[str, Any]) -> tuple[OnnxModule, Program, Program]:
    """With integers as inputs: the specialized program, and the same with direct calls."""
    model = parse(inputs, "float[a,b] z" if "Gather" in body else "float z", body, tensors, 18)
    net = OnnxModule(make_training_graph(model))
    return net, *direct_twin(net, (N,), torch.int64)


def run(net: OnnxModule, program: Program, given: torch.Tensor) -> list[torch.Tensor]:
    (z,) = program(True, torch.device("cpu"), (given,), net.tensors_by_name())
    return [z.detach(), *torch.autograd.grad(z.square().sum(), list(net.weights.values()))]


def loss_of(attributes: str) -> tuple[OnnxModule, Program, Program]:
    table = np.random.default_rng(0).normal(size=(N, V)).astype(np.float32)
    return program_and_twin(f"s = Mul(table, table)\nz = SoftmaxCrossEntropyLoss{attributes}(s, labels)",
                            f"int64[{N}] labels", {"table": table})  # fmt: skip


@pytest.mark.parametrize("attributes", ["", "<ignore_index=-100>", '<reduction="sum">', "<ignore_index=2>"])
def test_losses_have_the_same_bits(attributes: str) -> None:
    net, before, program = loss_of(attributes)
    assert "_loss_alone" in called(program)
    labels = torch.tensor([0, 4, 2, 1, 3, -100 if "-100" in attributes else 2])
    for one, other in zip(run(net, program, labels), run(net, before, labels), strict=True):
        assert torch.equal(one, other)


def test_losses_of_single_samples_stay() -> None:
    model = parse(f"int64[{N}] labels", "float[a] z", 'z = SoftmaxCrossEntropyLoss<reduction="none">(table, labels)',
                  {"table": np.ones((N, V), np.float32)}, 18)  # fmt: skip
    net = OnnxModule(make_training_graph(model))
    assert called(direct_twin(net, (N,), torch.int64)[1]) == ["softmax_cross_entropy_loss", "getitem"]


ERROR = "d = Sub(table, given)\ns = Mul(d, d)\nz = ReduceMean<keepdims=0>(s)"


def test_the_squared_error_is_torchs_own() -> None:
    table = np.random.default_rng(0).normal(size=(V, W)).astype(np.float32)
    net = OnnxModule(make_training_graph(parse(f"float[{V},{W}] given", "float z", ERROR, {"table": table}, 18)))
    _, program = direct_twin(net, (V, W))
    assert called(program) == ["mse_loss"]
    weight, given = net.weights["table"], torch.randn(V, W, generator=torch.Generator().manual_seed(0))
    (found,) = program(True, torch.device("cpu"), (given,), net.tensors_by_name())
    expected = torch.nn.functional.mse_loss(weight, given)
    assert torch.equal(found, expected)
    assert torch.equal(*(torch.autograd.grad(one, [weight])[0] for one in (found, expected)))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Mul(d, d)", "Mul(d, table)"),
        ("<keepdims=0>(s)", "<keepdims=0, axes=[0]>(s)"),
        ("(table, given)", "(table, row)"),
        ("z = ReduceMean<keepdims=0>(s)", "m = ReduceMean<keepdims=0>(s)\nt = ReduceMax<keepdims=0>(d)\nz = Add(m, t)"),
    ],
    ids=["a product", "one axis", "a row for all", "a difference that is read elsewhere"],
)
def test_other_means_stay(before: str, after: str) -> None:
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=size).astype(np.float32) for name, size in {"table": (V, W), "row": (W,)}.items()}
    body = ERROR.replace(before, after)
    tensors = {name: tensor for name, tensor in tensors.items() if name in body}
    inputs = f"float[{V},{W}] given"
    net = OnnxModule(
        make_training_graph(parse(inputs, "float[a] z" if "axes" in body else "float z", body, tensors, 17))
    )
    assert "mse_loss" not in called(direct_twin(net, (V, W))[1])


@pytest.mark.parametrize("label", [V, -1])
def test_a_label_out_of_range_is_named(label: int) -> None:
    net, _, program = loss_of("")
    labels = torch.tensor([0, 1, label, 3, 4, 0])
    with pytest.raises(Exception, match=rf"label {label} is out of range for {V} classes .* the first at \[2\]"):
        run(net, program, labels)


@pytest.mark.parametrize("indices", [[0, 4, 4, 2, 0, 1], [0, -1, 4, -5, 2, 2]])
def test_lookups_have_the_same_bits_and_count_from_the_end(indices: list[int]) -> None:
    table = np.random.default_rng(0).normal(size=(V, W)).astype(np.float32)
    net, before, program = program_and_twin("z = Gather(table, i)", f"int64[{N}] i", {"table": table})
    assert called(program) == ["_rows"]
    given = torch.tensor(indices)
    for one, other in zip(run(net, program, given), run(net, before, given), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(run(net, program, given)[0], torch.from_numpy(table)[given])


def test_a_position_beyond_the_table_is_an_error() -> None:
    net, _, program = program_and_twin("z = Gather(table, i)", f"int64[{N}] i", {"table": np.ones((V, W), np.float32)})
    with pytest.raises(Exception, match="out of range"):
        run(net, program, torch.full((N,), V))


def noted(graph: fx.Graph, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> fx.Node:
    node = graph.placeholder(name)
    node.meta[FACT] = TensorFact(shape, dtype)
    return node


@pytest.mark.parametrize("rows_are_classes", [1, 0])
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_last_layer_with_its_loss_has_the_same_bits(rows_are_classes: int, with_bias: bool) -> None:
    graph, shape = fx.Graph(), (V, W) if rows_are_classes else (W, V)
    nodes = [noted(graph, "x", (2, 3, W)), noted(graph, "w", shape), noted(graph, "l", (N,), torch.int64)]
    bias = noted(graph, "b", (V,)) if with_bias else None
    keywords: dict[str, Any] = {"ignore_index": -100, "reduction": "mean", "rows_are_classes": rows_are_classes}
    call = direct_losses.linear_cross_entropy(
        graph.call_function(linear_cross_entropy, (*nodes, None, None, None, bias), keywords)
    )
    assert call is not None
    generator = torch.Generator().manual_seed(0)
    values = {
        node: torch.randn(node.meta[FACT].shape, generator=generator).requires_grad_()
        for node in (*nodes[:2], *([] if bias is None else [bias]))
    }
    labels = torch.tensor([0, 4, -100, 1, 3, 2])
    arguments = [values.get(one, labels if one is nodes[2] else one) for one in call[1]]
    b = None if bias is None else values[bias]
    found = call[0](*arguments)
    expected = linear_cross_entropy(values[nodes[0]], values[nodes[1]], labels, None, None, None, b, **keywords)
    assert torch.equal(found, expected)
    for one, other in zip(*(torch.autograd.grad(z, list(values.values())) for z in (found, expected)), strict=True):
        assert torch.equal(one, other)


def test_a_layer_of_many_logits_stays() -> None:
    """Rows whose label does not count are left out of it."""
    graph = fx.Graph()
    nodes = [noted(graph, "x", (64, W)), noted(graph, "w", (512, W)), noted(graph, "l", (64,), torch.int64)]
    assert direct_losses.linear_cross_entropy(graph.call_function(linear_cross_entropy, tuple(nodes))) is None


def test_a_table_with_sparse_gradients_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fx.Graph()
    nodes = noted(graph, "t", (V, W)), noted(graph, "i", (N,), torch.int64)
    call = graph.call_function(sparse_lookups.lookup, nodes)
    assert direct_losses.lookup(call) is not None
    monkeypatch.setattr(sparse_lookups, "LEAST_BYTES", 0)
    assert direct_losses.lookup(call) is None
