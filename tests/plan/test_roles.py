"""Which nodes are bound to a stage, and which every stage computes for itself."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import TrainingGraph, make_training_graph
from onward.graph.weights.frozen_weights import LARGEST_TABLE_ELEMENTS
from onward.plan.roles import ValueRoles, find_roles, node_id
from tests.plan.staged_models import Sketch, graph_of


def finished(sketch: Sketch, value: ir.Value, weights: tuple[str, ...]) -> TrainingGraph:
    """The graph with a trained layer and a loss after `value`, a float [batch, 4]."""
    last = sketch.node("Gemm", "last", value, sketch.weight("trained", 4, 4))
    last.shape = ir.Shape(["batch", 4])
    loss = LossSpec(type="mean_squared_error", prediction="last", label="y")
    return make_training_graph(sketch.model(last), loss=loss, weights_to_train=("trained", *weights))


def bound(roles: ValueRoles) -> set[str]:
    return {node_id(node) for node in roles.nodes if node in roles.bound}


def test_what_meets_inputs_and_weights_is_bound() -> None:
    roles = find_roles(graph_of("awkward"))
    light = {node_id(node) for node in roles.nodes if node not in roles.bound}
    assert light == {"size", "above", "mask", "scale", "loss/label_rows"}
    by_id = {node_id(node): node for node in roles.nodes}
    assert {str(root.name) for root in roles.roots[by_id["size"]]} == {"relu0"}
    assert roles.roots[by_id["mask"]] == frozenset()


def test_gradients_flow_from_weights_through_floats_only() -> None:
    roles = find_roles(graph_of("awkward"))
    names = {str(value.name) for value in roles.with_gradient}
    assert {"fc0", "turned", "looked", "side_fc", "loss", "w1"} <= names
    assert not {"best", "flag", "size", "mask", "scale", "x"} & names


@pytest.mark.parametrize(
    ("elements", "is_bound"), [(LARGEST_TABLE_ELEMENTS // 4, False), (LARGEST_TABLE_ELEMENTS, True)]
)
def test_a_frozen_layer_is_computed_once_but_a_small_table_anywhere(elements: int, is_bound: bool) -> None:
    sketch = Sketch()
    x = sketch.input("x", ["batch", 4])
    wide = sketch.node("MatMul", "wide", x, sketch.weight("frozen", 4, elements))
    ends = [sketch.weight(name, array=np.array([number])) for name, number in (("from", 0), ("to", 4), ("axes", 1))]
    narrow = sketch.node("Slice", "narrow", wide, *ends)
    roles = find_roles(finished(sketch, narrow, ()))
    assert ("wide" in bound(roles)) is is_bound
    # What depends on a bound value is bound, too.
    assert ("narrow" in bound(roles)) is is_bound


def test_a_frozen_linear_layer_is_computed_once_when_it_is_fused() -> None:
    sketch = Sketch()
    product = sketch.node("MatMul", "product", sketch.input("x", ["batch", 4096]), sketch.weight("frozen", 4096, 4))
    wide = sketch.node("Add", "wide", product, sketch.weight("bias", 4))
    last = sketch.node("Gemm", "last", wide, sketch.weight("trained", 4, 4))
    last.shape = ir.Shape(["batch", 4])
    loss = LossSpec(type="mean_squared_error", prediction="last", label="y")
    graph = make_training_graph(sketch.model(last), loss=loss, weights_to_train=("trained",), fuse=True)
    assert [fusion.kind for fusion in graph.fusions] == ["linear"]
    assert "wide" in bound(find_roles(graph))


@pytest.mark.parametrize("op_type", ["RandomNormalLike", "Bernoulli", "Dropout"])
def test_random_numbers_are_drawn_on_one_stage(op_type: str) -> None:
    sketch = Sketch()
    x = sketch.input("x", ["batch", 4])
    noise = sketch.node(op_type, "noise", x)
    roles = find_roles(finished(sketch, sketch.node("Add", "noisy", x, noise), ()))
    assert {"noise", "noisy"} <= bound(roles)


def test_random_numbers_of_nested_graphs_are_found() -> None:
    sketch = Sketch()
    x = sketch.input("x", ["batch", 4])
    branches = {}
    for name in ("then", "else"):
        drawn = ir.node("RandomNormalLike", [x], name=f"drawn_{name}")
        drawn.outputs[0].name = f"drawn_{name}"
        drawn.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        branches[f"{name}_branch"] = ir.Graph([], drawn.outputs, nodes=[drawn], name=name)
    chosen = sketch.node("If", "chosen", sketch.weight("yes", array=np.array(True)), **branches)
    assert "chosen" in bound(find_roles(finished(sketch, chosen, ())))


def test_a_frozen_normalization_keeps_statistics_on_one_stage() -> None:
    sketch = Sketch()
    x = sketch.input("x", ["batch", 4])
    numbers = [sketch.weight(name, array=np.ones(4, np.float32)) for name in ("scale", "shift", "mean", "variance")]
    normed = sketch.node("BatchNormalization", "normed", x, *numbers)
    assert "normed" in bound(find_roles(finished(sketch, normed, ())))


def test_what_depends_on_weights_alone_is_light_and_brings_its_weights_along() -> None:
    sketch = Sketch()
    x = sketch.input("x", ["batch", 4])
    product = sketch.node("MatMul", "product", sketch.weight("a", 4, 2), sketch.weight("b", 2, 4))
    moved = sketch.node("MatMul", "moved", x, product)
    graph = finished(sketch, moved, ("a", "b"))
    roles = find_roles(graph)
    assert "product" not in bound(roles)
    node = next(node for node in roles.nodes if node_id(node) == "moved")
    assert roles.weights_of(node, frozenset(graph.weights)) == {"a", "b"}


def test_what_no_output_needs_is_left_out() -> None:
    sketch = Sketch()
    x = sketch.input("x", ["batch", 4])
    sketch.node("Relu", "unused", x)
    roles = find_roles(finished(sketch, x, ()))
    assert "unused" not in {node_id(node) for node in roles.nodes}
