"""The last linear layer with its loss, chunk by chunk, against the written-out graph and against torch's own loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import onward.lowering.ops.fused_cross_entropy as fused_cross_entropy
from onward.engine.forecast.allocations import Allocations
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from tests.graph.fusion.pairs import EXACT, kinds, parse

N, T, W, V = 2, 7, 6, 300
LABELS = torch.randint(0, V, (N, T), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six rows at once, so that the fourteen rows are three chunks, the last one short; each of blocks of five."""
    monkeypatch.setitem(fused_cross_entropy.CHUNK_ROWS, "cpu", 1)
    monkeypatch.setattr(fused_cross_entropy, "SMALL_BYTES", 0)
    for limits in (fused_cross_entropy.CHUNK_BYTES, fused_cross_entropy.COMPILED_BYTES):
        monkeypatch.setitem(limits, "cpu", 6 * 4 * V)
    monkeypatch.setitem(fused_cross_entropy.BLOCK_BYTES, "cpu", 5 * 4 * V)


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"w": rng.normal(size=(W, V)), "wt": rng.normal(size=(V, W)), "b": rng.normal(size=V)}


HEADS = {
    "product": "logits = MatMul(h, w)",
    "product and bias": "p = MatMul(h, w)\nlogits = Add(b, p)",
    "tied, transposed": "t = Transpose<perm=[1,0]>(wt)\nlogits = MatMul(h, t)",
    "Gemm of rows": "r = Reshape(h, rows)\ng = Gemm<transB=1>(r, wt, b)\nlogits = Reshape(g, back)",
    "Gemm of rows, the first token left out": (
        "r = Reshape(h, rows)\ng = Gemm<transB=1>(r, wt, b)\na = Reshape(g, back)\nlogits = Slice(a, i1, i7, i1)"
    ),
}


def model(head: str) -> onnx.ModelProto:
    body = f"h = Tanh(x)\n{HEADS[head]}"
    stored = {
        n: a for n, a in weights().items() if n in body.replace(",", " ").replace(")", " ").replace("(", " ").split()
    }
    if "rows" in body:
        stored |= {"rows": np.array([-1, W]), "back": np.array([N, T, V])}
    if "Slice" in body:
        stored |= {"i1": np.array([1]), "i7": np.array([T])}
    return parse(f"double[{N},{T},{W}] x", f"double[{N},{T - ('Slice' in body)},{V}] logits", body, stored)


def pair(head: str, **loss: Any) -> tuple[OnnxModule, OnnxModule]:
    spec = LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels", **loss)
    graphs = [make_training_graph(model(head), loss=spec, count_correct=True, fuse=fuse) for fuse in (False, True)]
    assert kinds(graphs[1]) == {"cross_entropy": 1} | ({"linear": 1} if "Add" in HEADS[head] else {})
    plain, fused = (OnnxModule(graph, ("loss",)) for graph in graphs)
    return plain, fused


def gradients(net: OnnxModule, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    leaf = x.clone().requires_grad_()
    net.zero_grad()
    loss = net(x=leaf, labels=labels)
    (loss * 3).backward()
    assert leaf.grad is not None
    return loss.detach(), {"x": leaf.grad, **{name: weight.grad for name, weight in net.weights.items()}}


def states() -> torch.Tensor:
    return torch.randn(N, T, W, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


CASES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "ignored": {"ignore_index": 5},
    "class weights": {"class_weights": np.linspace(0.1, 2, V).tolist()},
    "all of it": {"ignore_index": 5, "class_weights": np.linspace(0.1, 2, V).tolist()},
}


@pytest.mark.parametrize("case", CASES, ids=list(CASES))
@pytest.mark.parametrize("head", HEADS, ids=list(HEADS))
def test_loss_and_gradients(head: str, case: str) -> None:
    plain, fused = pair(head, **CASES[case])
    labels = LABELS.clone()
    labels[0, :3] = 5
    labels = labels[:, 1:].contiguous() if "left out" in head else labels
    (expected, wanted), (loss, found) = (gradients(net, states(), labels) for net in (plain, fused))
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)  # the loss of a graph is float32
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=EXACT, atol=EXACT * gradient.abs().max().item())


def test_logits_are_not_computed_unless_they_are_asked_for() -> None:
    _, fused = pair("tied, transposed")
    assert "logits" not in {node.meta["onnx"].name for node in fused.program.code.graph.nodes if "onnx" in node.meta}
    products = [n for n in fused.program.code.graph.nodes if "matmul" in str(n.target)]
    assert not products
    names = fused.graph.loss_names
    assert names is not None
    evaluating = fused.program_for((names.loss, str(names.correct), str(names.counted)))
    assert len([n for n in evaluating.code.graph.nodes if "matmul" in str(n.target)]) == 1
    results = evaluating(False, fused.device, [states(), LABELS], fused.tensors_by_name())
    torch.testing.assert_close(results[0], fused(states(), LABELS), rtol=1e-6, atol=0)
    assert int(results[2]) == N * T


def test_no_label_counts() -> None:
    """The mean is NaN, the gradient zero: torch's own answer."""
    plain, fused = pair("product and bias", ignore_index=5)
    labels = torch.full_like(LABELS, 5)
    for net in (plain, fused):
        loss, found = gradients(net, states(), labels)
        assert bool(loss.isnan())
        assert all(bool((gradient == 0).all()) for gradient in found.values())


@pytest.mark.parametrize("ignored", [0, 1, 2, 13, 14])
def test_rows_that_are_ignored_take_no_products(ignored: int) -> None:
    """A row costs `V W` products forward and as many for its own gradient; 1 of 14 is not worth looking for.

    The counter does not see the products of the weight's gradient, which are added up in place.
    """
    _, fused = pair("product", ignore_index=5)
    labels = torch.where(LABELS == 5, 6, LABELS).flatten()
    labels[torch.randperm(N * T, generator=torch.Generator().manual_seed(3))[:ignored]] = 5
    with FlopCounterMode(display=False) as counter:
        fused(states().requires_grad_(), labels.view(N, T)).backward()
    rows = N * T - ignored if 2 <= ignored < N * T else N * T
    assert counter.get_total_flops() == 2 * 2 * rows * V * W


def test_a_label_out_of_range_is_named() -> None:
    from onward.errors import NodeError

    _, fused = pair("product")
    labels = LABELS.clone()
    labels[1, 2] = V
    with pytest.raises(NodeError, match=rf"label {V} is out of range for {V} classes"):
        fused(states(), labels)


def test_a_backward_pass_that_keeps_its_graph_can_run_again() -> None:
    """As schedules do that compute gradients of weights later."""
    _, fused = pair("product and bias")
    leaves = [states().requires_grad_(), *fused.weights.values()]
    loss = fused(leaves[0], LABELS)
    passes = [torch.autograd.grad(3 * loss, leaves, retain_graph=keeps) for keeps in (True, True, False)]
    for again in passes[1:]:
        assert all(torch.equal(one, other) for one, other in zip(passes[0], again, strict=True))
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(3 * loss, leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_low_precision_is_no_less_exact(dtype: torch.dtype) -> None:
    """Under autocast: errors of loss and gradients against float64, fused at most 1.1 times the written-out graph's."""
    errors: dict[bool, dict[str, float]] = {}
    exact_net, _ = pair("product and bias")
    exact_loss, exact = gradients(exact_net, states(), LABELS)
    for fuse, net in zip((False, True), pair("product and bias"), strict=True):
        net.float()
        leaf = states().float().requires_grad_()
        low = {name: weight.to(dtype) for name, weight in net.weights.items()}
        with torch.autocast("cpu", dtype=dtype):
            (loss,) = net.program(True, net.device, [leaf, LABELS], {**net.tensors_by_name(), **low})
        (loss * 3).backward()
        found = {"x": leaf.grad, **{name: weight.grad for name, weight in net.weights.items()}}
        errors[fuse] = {name: float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact}
        errors[fuse]["loss"] = abs(float(loss.detach()) / float(exact_loss.detach()) - 1)
    for name, error in errors[True].items():
        assert error <= 1.1 * errors[False][name] + 1e-4, name


def test_masked_positions_are_picked_before_the_last_layer() -> None:
    """As BERT's loss wants them: hidden states of the masked places, not logits of all places."""
    body = (
        "h = Tanh(x)\nt = Transpose<perm=[1,0]>(wt)\np = MatMul(h, t)\nlogits = Add(p, b)\n"
        "nsp = ReduceSum<keepdims=0>(h, one)\n"
    )
    body += "nsp2 = MatMul(nsp, pair)"
    stored = {**{n: weights()[n] for n in ("wt", "b")}, "one": np.array([1]), "pair": np.ones((W, 2))}
    outputs = f"double[{N},{T},{V}] logits, double[{N},2] nsp2"
    proto = parse(f"double[{N},{T},{W}] x", outputs, body, stored)
    spec = LossSpec(type="bert", masked_lm_prediction="logits", next_sentence_prediction="nsp2")
    found = {}
    features = {
        "masked_lm_positions": torch.tensor([[0, 3, 5], [2, 1, 0]]),
        "masked_lm_ids": torch.tensor([[17, 250, 0], [3, 4, 0]]),
        "next_sentence_labels": torch.tensor([0, 1]),
    }
    for fuse in (False, True):
        graph = make_training_graph(proto, loss=spec, fuse=fuse)
        net = OnnxModule(graph, ("total_loss",))
        assert kinds(graph) == ({"cross_entropy": 1, "linear": 1} if fuse else {})
        loss = net(x=states(), **features)
        loss.backward()
        found[fuse] = {"loss": loss.detach(), **{name: weight.grad for name, weight in net.weights.items()}}
    for name, expected in found[False].items():
        torch.testing.assert_close(found[True][name], expected, rtol=1e-6 if name == "loss" else EXACT, atol=EXACT)


def test_logits_are_never_held_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest moment of both passes: one chunk of logits, and the gradients. torch's own holds logits thrice."""
    monkeypatch.setitem(fused_cross_entropy.CHUNK_BYTES, "cpu", 2**30)
    rows, width, classes = 400, 8, 3000
    hidden, weight = (torch.randn(n, width, requires_grad=True) for n in (rows, classes))
    labels = torch.randint(0, classes, (rows,))
    logits, gradients = 4 * rows * classes, 4 * width * (rows + classes)
    peaks = []
    for compute in (
        lambda: fused_cross_entropy.linear_cross_entropy(hidden, weight, labels),
        lambda: F.cross_entropy(F.linear(hidden, weight), labels),
    ):
        hidden.grad = weight.grad = None
        with Allocations() as log:
            compute().backward()
        peaks.append(sum(log.peak(0, log.now).values()) - gradients)
    assert logits <= peaks[0] <= 1.1 * logits + 2 * gradients
    assert peaks[1] >= 2 * logits


def test_few_classes_are_left_alone() -> None:
    proto = parse("double[n,6] x", "double[n,10] logits", "logits = MatMul(x, w)", {"w": np.ones((6, 10))})
    spec = LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels")
    assert kinds(make_training_graph(proto, loss=spec, fuse=True)) == {}


def test_source_and_outputs_stay() -> None:
    proto = model("product")
    graph = make_training_graph(
        proto, loss=LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels"), fuse=True
    )
    assert [node.op_type for node in graph.source.graph] == [node.op_type for node in proto.graph.node]
    assert [value.name for value in graph.model.graph.outputs] == ["logits", "loss"]


def test_torch_agrees() -> None:
    _, fused = pair("product and bias")
    w, b = (torch.from_numpy(weights()[n]).requires_grad_() for n in ("w", "b"))
    x = states().requires_grad_()
    expected = F.cross_entropy((x.tanh() @ w + b).flatten(0, 1), LABELS.flatten())
    (expected * 3).backward()
    loss, found = gradients(fused, states(), LABELS)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=0)
    for name, leaf in (("x", x), ("w", w), ("b", b)):
        torch.testing.assert_close(found[name], leaf.grad, rtol=EXACT, atol=EXACT)
