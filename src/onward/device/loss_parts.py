"""A loss that is the sum of several means, each of which counts its own labels in an update of several passes.

A pass does not know what its update will count, so gradients of the parts are accumulated apart. The traced loss is the
sum of the parts times a selector, an input; what depends on the selector, the backward pass, is then there once a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.nodes.node_writer import NodeWriter
from onward.graph.training_graph import TrainingGraph
from onward.losses.labels import LabelCount
from onward.losses.registry import loss_named
from onward.parameters import Parameters

SELECTOR = "loss_selector"
FLOAT = ir.DataType.FLOAT


def parts_of(graph: TrainingGraph) -> tuple[str, ...]:
    """The values whose sum is the loss; none where it is one mean."""
    names = graph.loss_names
    return () if names is None else names.addends or names.parts


def means_of(graph: TrainingGraph, parameters: Parameters) -> tuple[LabelCount | None, ...]:
    """What each mean counts whose gradients are accumulated apart: one, unless passes are one batch of several."""
    training, loss = parameters.training, parameters.loss
    distilled = graph.loss_names is not None and bool(graph.loss_names.addends)
    means = (*loss_named(loss.type).normalizer(loss), *([None] if distilled else []))
    is_one_batch = training.gradient_accumulation_steps > 1 and training.accumulate_as == "one_batch"
    return means if is_one_batch and loss.reduction != "sum" else means[:1]


def with_selector(graph: TrainingGraph) -> TrainingGraph:
    """The same with a loss that an input of as many numbers as it has parts multiplies the parts by.

    Raises:
        ModelError: the model has an input of that name.
    """
    parts, model = parts_of(graph), graph.model.clone()
    assert graph.loss_names is not None
    if any(value.name == SELECTOR for value in model.graph.inputs):
        raise ModelError(f"the model has an input {SELECTOR!r}, a name that accumulation needs. Rename it.")
    writer = NodeWriter(model, "parts/")
    selector = ir.Value(name=SELECTOR, type=ir.TensorType(FLOAT), shape=ir.Shape((len(parts),)))
    model.graph.inputs.append(selector)
    known = {str(value.name): value for node in model.graph for value in node.outputs}
    ones = [writer.reshape(writer.cast(known[part], FLOAT), [1]) for part in parts]
    total = writer.reduce_all(writer.apply("Mul", writer.apply("Concat", *ones, axis=0), selector), "sum")
    total.type, total.shape = ir.TensorType(FLOAT), ir.Shape(())
    model.graph.outputs.append(total)
    return replace(graph, model=model, loss_names=replace(graph.loss_names, loss=str(total.name)))


def repeat_for_parts(model: ir.Model, outputs: Sequence[ir.Value], count: int) -> list[list[ir.Value]]:
    """What outputs are for each part alone; the selector is no input any more.

    Args:
        model: traced from a graph `with_selector`, changed in place.
        outputs: any values of it.
        count: of the parts.

    Raises:
        ModelError: a loop or branch depends on the selector.
    """
    graph, writer = model.graph, NodeWriter(model, "parts/")
    selector = next(value for value in graph.inputs if value.name == SELECTOR)
    reached, dependent = set[ir.Value | None]([selector]), list[ir.Node]()
    for node in graph:
        inside = [
            v for one in _nested(node) for inner in ir.traversal.RecursiveGraphIterator(one) for v in inner.inputs
        ]
        if not reached.isdisjoint((*node.inputs, *inside)):
            dependent.append(node)
            reached |= set(node.outputs)
    if any(_nested(node) for node in dependent):
        raise ModelError(
            "the backward pass has loops or branches, and the loss is a sum of several means, which needs several "
            "backward passes. Set training.accumulate_as to mean, or training.gradient_accumulation_steps to 1."
        )
    ones = [writer.constant(np.eye(count)[part], f"part_{part}", np.float32) for part in range(count)]
    found = [list(outputs)]
    for one in ones[1:]:
        made: dict[ir.Value | None, ir.Value] = {selector: one}
        for node in dependent:
            attributes = list(node.attributes.values())
            copy = writer.new_node(
                node.op_type, [made.get(v, v) for v in node.inputs], "parts/again", copied=attributes,
                outputs=len(node.outputs),
            )  # fmt: skip
            graph.append(copy)
            for old, new in zip(node.outputs, copy.outputs, strict=True):
                new.type, new.shape = old.type, old.shape
                made[old] = new
        found.append([made.get(value, value) for value in outputs])
    selector.replace_all_uses_with(ones[0])
    graph.inputs.remove(selector)
    graph.sort()
    return found


def _nested(node: ir.Node) -> list[ir.Graph]:
    return [one.as_graph() for one in node.attributes.values() if one.type is ir.AttributeType.GRAPH]
