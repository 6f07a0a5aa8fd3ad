"""Twice the layers, twice the work: no function that reads a graph runs through more than that many of its lines."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import onward
from onward.graph.training_graph import make_training_graph
from onward.lowering.inspection import describe
from onward.parameters.adapter import Adapter
from onward.parameters.training import DropoutRule
from onward.proposal.model_facts import read_model_facts

SOURCES = str(Path(onward.__file__).parent)

LAYERS = 30


def model_of(layers: int, shared_bias: bool = False) -> onnx.ModelProto:
    """Layers of four nodes without names, as some exporters write them."""
    nodes, tensors, last = [], [], "x"
    for index in range(layers):
        bias = "b0" if shared_bias else f"b{index}"
        tensors.append(numpy_helper.from_array(np.full((8, 8), index + 1, np.float32), f"w{index}"))
        if bias == f"b{index}":
            tensors.append(numpy_helper.from_array(np.full(8, index, np.float32), bias))
        nodes += [
            helper.make_node("MatMul", [last, f"w{index}"], [f"a{index}"]),
            helper.make_node("Add", [f"a{index}", bias], [f"c{index}"]),
            helper.make_node("Relu", [f"c{index}"], [f"d{index}"]),
            helper.make_node("Add", [last, f"d{index}"], [f"x{index}"]),
        ]
        last = f"x{index}"
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [value("x", 1, ["n", 8])], [value(last, 1, ["n", 8])], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def lines_run(function: Callable[[onnx.ModelProto], Any], model: onnx.ModelProto) -> Counter[CodeType]:
    """How many lines of each of onward's functions a call runs through."""
    counts: Counter[CodeType] = Counter()

    def count(frame: FrameType, event: str, _: object) -> Any:
        counts[frame.f_code] += 1
        return count

    def enter(frame: FrameType, event: str, _: object) -> Any:
        return count if frame.f_code.co_filename.startswith(SOURCES) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        function(model)
    finally:
        sys.settrace(before)
    return counts


def propose(model: onnx.ModelProto) -> None:
    read_model_facts(Path("model.onnx"), training=make_training_graph(model))


READERS: dict[str, Callable[[onnx.ModelProto], Any]] = {
    "inspect": describe,
    "propose": propose,
    "fuse": lambda model: make_training_graph(model, fuse=True),
    "dropout": lambda model: make_training_graph(
        model, revive_dropout=[DropoutRule(ratio=0.1, after_operators=("Relu",))]
    ),
    "adapter": lambda model: make_training_graph(model, adapter=Adapter(rank=2)),
    "to_torch": onward.to_torch,
}


@pytest.mark.parametrize("reader", READERS)
def test_twice_the_layers_are_twice_the_lines(reader: str) -> None:
    check(READERS[reader])


def test_a_shared_tensor_is_split_in_linear_time() -> None:
    check(lambda model: make_training_graph(model, untied_weights=["b0"]), shared_bias=True)


def check(function: Callable[[onnx.ModelProto], Any], **options: bool) -> None:
    function(model_of(2, **options))  # what is imported or cached at the first call is not counted
    once = lines_run(function, model_of(LAYERS, **options))
    twice = lines_run(function, model_of(2 * LAYERS, **options))
    assert sum(once.values()) > 1000 * LAYERS, "the lines were not counted"
    grown = {code.co_qualname: (once[code], count) for code, count in twice.items() if count > 2.3 * once[code]}
    assert not {name: counts for name, counts in grown.items() if counts[1] > 4 * LAYERS}
