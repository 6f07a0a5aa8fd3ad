"""Measuring speed before there are data: synthetic batches made from a model's inputs, and what a run of them tells."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from onward.data.in_memory import InMemoryDataLoader, SyntheticFeature, make_synthetic_loader
from onward.engine.building.graph_costs import known_costs
from onward.engine.building.sizes import input_sizes
from onward.engine.inputs.index_ranges import FeatureRange
from onward.engine.matmul_rate import format_operations, matmul_rate
from onward.engine.network.precision import Precision
from onward.engine.reports import RunSummary
from onward.graph.training_graph import TrainingGraph
from onward.lowering.module import input_types
from onward.parameters import Parameters

SYNTHETIC_BATCHES = 4
"""So many batches are drawn and read again and again."""


def synthetic_loader(
    parameters: Parameters,
    graph: TrainingGraph,
    dimensions: Mapping[str, int],
    feature_ranges: Mapping[str, FeatureRange],
) -> InMemoryDataLoader:
    """Random batches that a graph can read: labels among its classes, indices among the rows of its tables.

    Raises:
        ParametersError: the size of a dimension is not known.
    """
    sizes, (dtypes, _) = input_sizes(graph, dimensions), input_types(graph)
    features = {}
    for name, shape in sizes.items():
        dtype = torch.empty(0, dtype=dtypes[name]).numpy().dtype
        low, high = feature_ranges[name].counted if name in feature_ranges else (0, 2 if dtype.kind in "iub" else 1)
        features[name] = SyntheticFeature(shape[1:], dtype, low, high)
    samples = parameters.training.batch_size * SYNTHETIC_BATCHES
    return make_synthetic_loader(features, samples, seed=parameters.training.seed)


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
