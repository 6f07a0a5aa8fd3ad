"""Measuring speed before there are data: synthetic batches made from a model's inputs, and what a run of them tells."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
import torch

from onward.data.in_memory import InMemoryDataLoader, SyntheticFeature, make_synthetic_loader
from onward.engine.building.graph_costs import known_costs
from onward.engine.building.sizes import input_sizes
from onward.engine.matmul_rate import format_operations, matmul_rate
from onward.engine.network.precision import Precision
from onward.engine.reports import RunSummary
from onward.graph.cuts import reads
from onward.graph.operators import Fact, operators_with
from onward.graph.training_graph import TrainingGraph
from onward.losses.labels import LabelRange
from onward.lowering.module import input_types
from onward.parameters import Parameters

_MOVES = operators_with(Fact.SAME_ELEMENTS) | {"Cast"}

SYNTHETIC_BATCHES = 4
"""So many batches are drawn and read again and again."""


def synthetic_loader(
    parameters: Parameters,
    graph: TrainingGraph,
    dimensions: Mapping[str, int],
    label_ranges: Mapping[str, LabelRange],
) -> InMemoryDataLoader:
    """Random batches that a graph can read: labels among its classes, indices among the rows of its tables.

    Raises:
        ParametersError: the size of a dimension is not known.
    """
    sizes, (dtypes, _) = input_sizes(graph, dimensions), input_types(graph)
    rows = _table_rows(graph)
    features = {}
    for name, shape in sizes.items():
        dtype = torch.empty(0, dtype=dtypes[name]).numpy().dtype
        highest = rows.get(name, 2 if dtype.kind in "iub" else 1)
        low, high = label_ranges[name].counted if name in label_ranges else (0, highest)
        features[name] = SyntheticFeature(shape[1:], dtype, low, high)
    samples = parameters.training.batch_size * SYNTHETIC_BATCHES
    return make_synthetic_loader(features, samples, seed=parameters.training.seed)


def _table_rows(graph: TrainingGraph) -> dict[str, int]:
    """Inputs that pick rows of tables -> rows of the smallest of them, through casts and reshapes."""
    found: dict[str, int] = {}
    inputs = {value for value in graph.model.graph.inputs if not value.is_initializer()}
    origin: dict[ir.Value, ir.Value] = {value: value for value in inputs}
    for node in graph.model.graph:
        read = list(reads(node))
        if node.op_type in _MOVES and read[0] in origin:
            origin[node.outputs[0]] = origin[read[0]]
        if node.op_type == "Gather" and len(read) > 1 and read[1] in origin and read[0].shape is not None:
            axis = node.attributes.get_int("axis", 0)
            size = read[0].shape[axis]
            if isinstance(size, int):
                name = str(origin[read[1]].name)
                found[name] = min(size, found.get(name, size))
    return found


def performance_lines(
    parameters: Parameters,
    graph: TrainingGraph,
    dimensions: Mapping[str, int],
    summary: RunSummary,
    device: torch.device,
    world_size: int,
) -> list[str]:
    """What was measured, one sentence each: throughput, share of the machine's own rate, peak memory."""
    cost = known_costs(graph, dict(dimensions))
    total = cost.total(cost.nodes)
    operations = total.forward + total.backward_input + total.backward_weight
    per_sample = operations / parameters.training.batch_size
    rate = per_sample * summary.stable_samples_per_second / world_size
    dtype = Precision.of(parameters.mixed_precision).dtype or torch.float32
    possible = matmul_rate(device, dtype)
    memory = summary.peak_memory_bytes or 0
    kind = str(dtype).removeprefix("torch.")
    return [
        f"performance: {summary.stable_samples_per_second:,.1f} samples/s on synthetic data, over the last steps.",
        f"performance: {format_operations(per_sample)} a sample, {format_operations(rate)}/s a process: "
        f"{rate / possible:.1%} of the {format_operations(possible)}/s of a large {kind} matmul here.",
        f"performance: {memory / 2**20:,.0f} MiB at most in this process"
        + (", all that torch allocated on the GPU." if device.type == "cuda" else ", Python and libraries included."),
    ]
