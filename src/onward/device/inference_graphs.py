"""Evaluation and inference over the same weights as a step: the user's graph, prepared as for training, not traced."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from onward.artifacts.optimizer_graph import add_output
from onward.device.label_counts import FLOAT, append_count
from onward.device.layout import DeviceMetric, average_name
from onward.device.master_weights import master_of
from onward.engine.evaluating.evaluation import EvaluationOutputs, evaluation_outputs
from onward.errors import ModelError
from onward.graph.nodes.node_writer import NodeWriter
from onward.graph.repair.inference_mode import switch_to_inference
from onward.graph.training_graph import TrainingGraph, outputs_of
from onward.losses.info_nce import GATHER_REPLICAS
from onward.parameters import Loss

_OLDEST_IR_VERSION = 4
"""In which an initializer need not be an input."""


def inference_graph(graph: TrainingGraph, averages: bool = False) -> ir.Model:
    """The user's outputs; weights and statistics are inputs, with `averages` the averages of the weights.

    Raises:
        ModelError: an operator is none that ONNX Runtime knows.
    """
    return _of(graph, outputs_of(graph), "inference", averages)


def evaluation_graph(
    graph: TrainingGraph, settings: Loss, averages: bool = False
) -> tuple[ir.Model, tuple[DeviceMetric, ...]]:
    """What an evaluation adds up for each batch, in float32; inputs are those of `inference_graph`, and labels.

    Raises:
        ModelError: an operator is none that ONNX Runtime knows.
    """
    assert graph.loss_names is not None
    asked = evaluation_outputs(graph.loss_names, settings)
    model = _of(graph, asked.names, "evaluation", averages)
    values = dict(zip(asked.names, model.graph.outputs, strict=True))
    inputs = {str(value.name): value for value in model.graph.inputs}
    model.graph.outputs.clear()
    writer = NodeWriter(model, "metrics/")
    feature, found = model.graph.inputs[0], []
    for name, source in asked.means.items():
        found.append(_mean(writer, asked, name, values[source], inputs, feature))
    if asked.correct is not None and asked.counted is not None:
        hits, all_labels = (writer.cast(values[one], FLOAT) for one in (asked.correct, asked.counted))
        found.append(_metric(writer, asked.accuracy, hits, all_labels))
    found += [DeviceMetric(name=name, total_of=parts) for name, parts in asked.totals.items()]
    return model, tuple(found)


def _mean(
    writer: NodeWriter,
    asked: EvaluationOutputs,
    name: str,
    value: ir.Value,
    inputs: dict[str, ir.Value],
    feature: ir.Value,
) -> DeviceMetric:
    value = writer.cast(value, FLOAT)
    if asked.are_sums:
        return _metric(writer, name, value, append_count(writer, inputs, feature, None))
    count = append_count(writer, inputs, feature, asked.per_label.get(name))
    # The mean over no label is NaN, and is to count for nothing.
    zero = writer.constant(0.0, "zero", np.float32)
    weighed = writer.apply("Where", writer.apply("Greater", count, zero), writer.apply("Mul", value, count), zero)
    return _metric(writer, name, weighed, count)


def _metric(writer: NodeWriter, name: str, total: ir.Value, count: ir.Value) -> DeviceMetric:
    for value, ending in ((total, "sum"), (count, "count")):
        copy = writer.apply("Identity", value)
        add_output(writer.model, copy, f"{name}_{ending}", FLOAT, ())
    return DeviceMetric(name=name, sum=f"{name}_sum", count=f"{name}_count")


def _of(graph: TrainingGraph, outputs: Sequence[str], name: str, averages: bool) -> ir.Model:
    """A copy of the prepared graph in inference mode that computes some of its values."""
    model = graph.model.clone()
    for node in model.graph:
        if (node.domain, node.op_type) == ("onward.fused", GATHER_REPLICAS):
            node.domain, node.op_type = "", "Identity"  # of the one replica that there is
    switch_to_inference(model)
    known = {str(value.name): value for node in model.graph for value in node.outputs}
    known |= {str(value.name): value for value in (*model.graph.inputs, *model.graph.initializers.values())}
    model.graph.outputs.clear()
    model.graph.outputs.extend(known[one] for one in outputs)
    passes.RemoveUnusedNodesPass()(model)
    _drop_unread_inputs(model.graph, outputs)
    writer = NodeWriter(model, "inputs/")
    for learned in (*graph.weights, *graph.states):
        value = model.graph.initializers.pop(learned, None)
        if value is not None:
            value.const_value = None
            model.graph.inputs.append(value)
            taken = master_of(writer, value)
            if averages and learned in graph.weights:
                taken.name = average_name(learned)
    model.graph.sort()
    passes.RemoveUnusedOpsetsPass()(model)
    _check_operators(model, name)
    model.ir_version = max(model.ir_version or 0, _OLDEST_IR_VERSION)
    model.graph.name = name
    return model


def _drop_unread_inputs(graph: ir.Graph, outputs: Collection[str]) -> None:
    for value in list(graph.inputs):
        if not value.uses() and value.name not in outputs:
            graph.inputs.remove(value)


def _check_operators(model: ir.Model, name: str) -> None:
    own = sorted(
        {node.op_type for node in ir.traversal.RecursiveGraphIterator(model.graph) if node.domain.startswith("onward")}
    )
    if own:
        raise ModelError(
            f"the {name} graph needs {', '.join(own)}, which are operators of onward's own that no other runtime has. "
            "Train this model with `onward train`."
        )
