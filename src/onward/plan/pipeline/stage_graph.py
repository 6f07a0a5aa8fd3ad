"""The part of a training graph that one pipeline stage computes, as an ordinary training graph of its own."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir
from onnx_ir import convenience

from onward.graph.losses.spec import LossNames
from onward.graph.nodes.shape_inference import inferred_values
from onward.graph.training_graph import TrainingGraph
from onward.plan.pipeline.stages import Stage, StagePlan


def stage_graph(graph: TrainingGraph, plan: StagePlan, index: int) -> TrainingGraph:
    """The sub-graph of a stage: what it receives are inputs, what it computes for others and for the user are outputs.

    Inputs are the network's own first, then the received values in the order in which they travel; outputs are what it
    sends (but not what it only relays), then the network's outputs that it computes. Initializers are those that
    its nodes read: the tensors themselves are shared with `graph`, and read from the file when they are used.

    Args:
        graph: the entire network, as it was when the plan was made.
        plan: of its stages.
        index: which stage.
    """
    stage = plan.stages[index]
    values = convenience.create_value_mapping(graph.model.graph, include_subgraphs=False)
    names = (*stage.inputs, *(transfer.name for transfer in stage.received))
    # extract() wants each initializer that is an input of the graph, too, named as a boundary; there are none here.
    part = convenience.extract(graph.model.graph, [values[n] for n in names], [values[n] for n in computed(stage)])
    model = ir.Model(
        part,
        ir_version=graph.model.ir_version,
        producer_name=graph.model.producer_name,
        producer_version=graph.model.producer_version,
        domain=graph.model.domain,
        model_version=graph.model.model_version,
    )
    _fill_in_types(graph, part)
    kept = set(part.initializers)
    return replace(
        graph,
        model=model,
        weights=stage.weights,
        states=stage.states,
        ties={name: tie for name, tie in graph.ties.items() if tie.weight in stage.weights},
        frozen={name: reason for name, reason in graph.frozen.items() if name in kept},
        loss_names=_loss_names(graph, stage, kept),
    )


def _fill_in_types(graph: TrainingGraph, part: ir.Graph) -> None:
    """Inputs and outputs of an ONNX file have types; values inside of the user's file need not."""
    untyped = [value for value in (*part.inputs, *part.outputs) if value.type is None]
    if untyped:
        known = inferred_values(graph.model)
        for value in untyped:
            found = known.get(str(value.name))
            if found is not None:
                value.type, value.shape = found.type, found.shape


def computed(stage: Stage) -> tuple[str, ...]:
    """What a stage computes for others: what it sends without only relaying it, and outputs of the network."""
    relayed = set(stage.relayed)
    sent = [transfer.name for transfer in stage.sent if transfer.name not in relayed]
    return tuple(dict.fromkeys((*sent, *stage.outputs)))


def _loss_names(graph: TrainingGraph, stage: Stage, initializers: set[str]) -> LossNames | None:
    """Of the last stage: all that the loss is called; of the others None, though they may compute parts of it."""
    names = graph.loss_names
    if names is None or names.loss not in stage.outputs:
        return None
    return replace(
        names,
        parts=tuple(name for name in names.parts if name in stage.outputs),
        labels=tuple(name for name in names.labels if name in stage.inputs),
        constants=tuple(name for name in names.constants if name in initializers),
        correct=names.correct if names.correct in stage.outputs else None,
        counted=names.counted if names.counted in stage.outputs else None,
    )
