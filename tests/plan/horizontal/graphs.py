"""Graphs that are sharded, and their plans."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import TrainingGraph, make_training_graph
from onward.lowering.building.shapes import find_value_facts
from onward.models import create_model
from onward.plan.horizontal.planning import HorizontalPlan, plan_horizontal

CROSS_ENTROPY = LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels")


def gpt2(**options: object) -> TrainingGraph:
    fixed = {"size": "tiny", "layers": 1, "heads": 4, "width": 32, "vocab_size": 96, "context_length": 16}
    return make_training_graph(create_model("gpt2", **{**fixed, **options}), loss=CROSS_ENTROPY)


def planned(graph: TrainingGraph, size: int, shape: tuple[int, ...] = (2, 7)) -> HorizontalPlan:
    names = [str(v.name) for v in graph.model.graph.inputs]
    facts = find_value_facts(graph, dict.fromkeys(names, shape))
    return plan_horizontal(graph, size, facts.shapes, facts.numbers)


def parsed(text: str, weights: dict[str, tuple[int, ...]], loss: str = "loss") -> TrainingGraph:
    """A graph in ONNX's text form whose output `loss` is minimized, with weights as of `parsed_model`."""
    return make_training_graph(parsed_model(text, weights), loss=LossSpec(type="output", prediction=loss))


def parsed_model(text: str, weights: dict[str, tuple[int, ...]], scale: float = 1.0) -> ir.Model:
    """A model in ONNX's text form of which these inputs are weights, drawn from a normal distribution."""
    model = ir.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> {text}'))
    generator = np.random.default_rng(0)
    inputs = {value.name: value for value in model.graph.inputs}
    for name, shape in weights.items():
        value = inputs[name]
        model.graph.inputs.remove(value)
        value.const_value = ir.Tensor((scale * generator.standard_normal(shape)).astype(np.float32), name=name)
        model.graph.register_initializer(value)
    return model
