"""Programs that are the same code with other weights are distinguished from those that are not."""

from __future__ import annotations

import operator
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import fx

from onward.graph.training_graph import make_training_graph
from onward.lowering.building.equal_segments import signature_of, structure_of
from onward.lowering.building.segments import split_program
from onward.lowering.module import OnnxModule
from onward.models import create_model
from onward.parameters import Recompute
from onward.plan.costs.segments import plan_segments


def code(prefix: str, number: Any, function: Any = operator.add, swapped: bool = False) -> fx.GraphModule:
    graph = fx.Graph()
    a, b = graph.placeholder(f"{prefix}a"), graph.placeholder(f"{prefix}b")
    total = graph.call_function(function, (b, a) if swapped else (a, b))
    graph.output((graph.call_function(torch.mul, (total, number)),))
    return fx.GraphModule({}, graph)


def test_names_do_not_count() -> None:
    assert structure_of(code("x", 1.0)) == structure_of(code("y", 1.0))


@pytest.mark.parametrize(
    "other",
    [
        code("x", 2.0),
        code("x", 1),
        code("x", True),
        code("x", 1.0, operator.sub),
        code("x", 1.0, swapped=True),
        code("x", (1.0,)),
        code("x", slice(1.0)),
    ],
    ids=["number", "whole number", "flag", "function", "order", "tuple", "slice"],
)
def test_all_else_counts(other: fx.GraphModule) -> None:
    assert structure_of(code("x", 1.0)) != structure_of(other)


def test_zeros_of_both_signs_differ_and_nan_equals_itself() -> None:
    assert structure_of(code("x", 0.0)) != structure_of(code("x", -0.0))
    assert structure_of(code("x", float("nan"))) == structure_of(code("y", float("nan")))


def test_what_holds_a_module_equals_only_itself() -> None:
    """A nested graph is a module: its own code is not compared."""
    first, second = (fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU())) for _ in range(2))
    assert structure_of(first) == structure_of(first)
    assert structure_of(first) != structure_of(second)


def test_signatures_tell_shapes_types_and_gradients_apart() -> None:
    x = torch.zeros(2, 3)
    assert signature_of((True, x)) == signature_of((True, torch.ones(2, 3)))
    for other in (x.T, x.double(), torch.zeros(3, 2), torch.zeros(2, 3, requires_grad=True)):
        assert signature_of((True, x)) != signature_of((True, other))
    assert signature_of((True, x)) != signature_of((1, x))


def pieces_of_code(model: ir.Model) -> tuple[int, int]:
    """Segments of a model, and how many different graphs they are."""
    graph = make_training_graph(model)
    net = OnnxModule(graph)
    plan = plan_segments(graph.model.graph, graph.weights, True, Recompute())
    split = split_program(net.program, plan.segment_of, plan.count)
    return plan.count, len({structure_of(segment.code) for segment in split.segments})


def test_layers_of_a_transformer_are_one_piece_however_many() -> None:
    options = {"size": "tiny", "width": 16, "heads": 2, "vocab_size": 32, "context_length": 8, "dropout": 0.0}
    few = pieces_of_code(create_model("gpt2", **options, layers=3))
    many = pieces_of_code(create_model("gpt2", **options, layers=7))
    assert many[0] == few[0] + 8  # an attention and a network of two linear layers each
    assert many[1] == few[1]
