"""The loops that torch's exporter writes for bags of embeddings become one node each; others stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from onward.errors import ModelError, NodeError
from onward.graph.training_graph import TrainingGraph, make_training_graph
from onward.lowering.module import OnnxModule
from tests.graph.fusion.pairs import kinds

BAGS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3])
FACTORS = torch.linspace(-1.0, 2.0, 10)


class Bags(nn.Module):
    """`nn.EmbeddingBag` before a linear layer."""

    def __init__(self, mode: str, includes_end: bool = False) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(10, 4, mode=mode, include_last_offset=includes_end)
        self.head = nn.Linear(4, 3)

    def forward(self, *inputs: Tensor) -> Tensor:
        result: Tensor = self.head(self.bags(*inputs))
        return result


def export(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """The module as torch writes it, before and after its optimization."""
    program = torch.onnx.export(module.eval(), inputs, dynamo=True, optimize=False, verbose=False)
    assert program is not None
    written = ir.to_proto(program.model)
    program.optimize()
    return written, ir.to_proto(program.model)


CASES = [
    pytest.param("mean", False, (BAGS.reshape(2, 5),), id="mean, bags of one size"),
    pytest.param("max", False, (BAGS.reshape(5, 2),), id="max, bags of one size"),
    pytest.param("sum", False, (BAGS, torch.tensor([0, 3, 3, 8])), id="sum"),
    pytest.param("sum", True, (BAGS, torch.tensor([0, 2, 2, 10])), id="sum with the last end"),
    pytest.param("sum", False, (BAGS, torch.tensor([0, 4]), FACTORS), id="sum with factors"),
    pytest.param("mean", False, (BAGS, torch.tensor([0, 3, 3, 8])), id="mean"),
    pytest.param("mean", True, (BAGS, torch.tensor([0, 0, 7, 10])), id="mean with the last end"),
    pytest.param("max", False, (BAGS, torch.tensor([0, 3, 3, 8])), id="max"),
]


@pytest.mark.parametrize(("mode", "includes_end", "inputs"), CASES)
def test_equals_torch(mode: str, includes_end: bool, inputs: tuple[Tensor, ...]) -> None:
    torch.manual_seed(0)
    module = Bags(mode, includes_end)
    expected = module(*inputs)
    direction = torch.randn(expected.shape)
    (expected * direction).sum().backward()
    for model in export(module, inputs):
        graph = make_training_graph(model, fuse=True)
        assert kinds(graph)["embedding_bag"] == 1
        assert not {node.op_type for node in graph.model.graph} & {"If", "Loop", "SequenceEmpty", "Gather"}
        net = OnnxModule(graph)
        found = net(*inputs)
        torch.testing.assert_close(found, expected)
        (found * direction).sum().backward()
        for name, weight in module.named_parameters():
            torch.testing.assert_close(net.weights[name].grad, weight.grad)


def test_other_loops_stay() -> None:
    model, _ = export(Bags("sum"), (BAGS, torch.tensor([0, 3, 3, 8])))
    changed = _reduce_by(model.graph, "ReduceProd")
    assert changed == 1
    graph = make_training_graph(model, fuse=True)
    assert "embedding_bag" not in kinds(graph)
    assert "Loop" in {node.op_type for node in graph.model.graph}


def _reduce_by(graph: onnx.GraphProto, op_type: str) -> int:
    """Makes another operator of the first sum in nested graphs."""
    for node in graph.node:
        if node.op_type == "ReduceSum":
            node.op_type = op_type
            return 1
        for attribute in node.attribute:
            if attribute.HasField("g") and _reduce_by(attribute.g, op_type):
                return 1
    return 0


def _body(model: onnx.ModelProto) -> onnx.GraphProto:
    """The loop over the bags."""
    (loop,) = [node for node in model.graph.node if node.op_type == "Loop"]
    body: onnx.GraphProto = next(a.g for a in loop.attribute if a.name == "body")
    return body


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def _variants(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.ModelProto]]:
    """The model with one node of the loop, or of what it reads, made another one that can be computed, too."""
    other = {"ReduceSum": "ReduceMax", "ReduceMean": "ReduceSum", "ReduceMax": "ReduceMin", "Equal": "Less",
             "Greater": "Less", "Less": "LessOrEqual", "Sub": "Add", "Div": "Mul"}  # fmt: skip
    body = _body(model)
    for place, graph in enumerate(_graphs(body)):
        for index, node in enumerate(graph.node):
            if node.op_type in other:
                changed = onnx.ModelProto.FromString(model.SerializeToString())
                target = list(_graphs(_body(changed)))[place].node[index]
                target.op_type = other[node.op_type]
                yield f"{node.op_type} -> {target.op_type} ({place}, {index})", changed
            if node.op_type == "Slice" and len(node.input) > 2:
                changed = onnx.ModelProto.FromString(model.SerializeToString())
                target = list(_graphs(_body(changed)))[place].node[index]
                target.input[1], target.input[2] = target.input[2], target.input[1]
                yield f"Slice, ends exchanged ({place}, {index})", changed
            for attribute in (a for a in node.attribute if a.name in ("keepdims", "axis")):
                changed = onnx.ModelProto.FromString(model.SerializeToString())
                target = list(_graphs(_body(changed)))[place].node[index]
                next(a for a in target.attribute if a.name == attribute.name).i = 1 - attribute.i
                yield f"{node.op_type}, {attribute.name} ({place}, {index})", changed


def _outcome(graph: TrainingGraph, inputs: tuple[Tensor, ...]) -> list[Tensor] | None:
    """Outputs and gradients; None, if the model cannot be computed."""
    try:
        net = OnnxModule(graph)
        found = net(*inputs)
        found.sin().sum().backward()
    except (ModelError, NodeError, RuntimeError, ValueError, IndexError):
        return None
    return [found.detach(), *(w.grad for w in net.weights.values() if w.grad is not None)]


@pytest.mark.parametrize(("mode", "includes_end", "inputs"), CASES)
def test_a_loop_that_is_one_node_off_computes_what_it_says(
    mode: str, includes_end: bool, inputs: tuple[Tensor, ...]
) -> None:
    """It stays a loop, or the result is that of the loop as it stands, which ONNX's own steps define."""
    torch.manual_seed(0)
    model, _ = export(Bags(mode, includes_end), inputs)
    outcomes = Counter[str]()
    for name, changed in _variants(model):
        try:
            fused = make_training_graph(changed, fuse=True)
        except ModelError:
            outcomes["refused"] += 1
            continue
        if "embedding_bag" not in kinds(fused):
            outcomes["loop"] += 1
            continue
        plain = _outcome(make_training_graph(changed, fuse=False), inputs)
        outcomes["fused, but cannot be computed" if plain is None else "fused"] += 1
        if plain is None:
            continue
        found = _outcome(fused, inputs)
        assert found is not None, name
        for one, other in zip(found, plain, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")
    assert min(outcomes["loop"], outcomes["fused"]) >= 3
