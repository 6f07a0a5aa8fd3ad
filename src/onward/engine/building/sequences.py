"""The plan of context parallelism of a run, for batches of any number of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onward.engine.building.sizes import input_sizes
from onward.graph.training_graph import TrainingGraph
from onward.lowering.building.shapes import ValueFacts, find_value_facts
from onward.lowering.module import input_types
from onward.plan.context.cutting import ContextPlan, plan_context

_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101)


def plan_sequences(
    graph: TrainingGraph, size: int, dimensions: Mapping[str, int], batch_size: int
) -> tuple[ContextPlan, ValueFacts, int]:
    """Cuts the sequences of a graph, where its batches may have any number of samples, whatever the run's is now.

    Args:
        graph: the full network with its loss.
        size: how many ranks share a sequence.
        dimensions: sizes of the symbolic dimensions in a micro-batch.
        batch_size: of the micro-batch.

    Returns:
        The plan; what is known of the graph's values for a batch of so many samples.

    Raises:
        ParametersError: a size is not known, no sequence is found, or too little could be cut.
    """
    _, shapes = input_types(graph)
    first = {shape[0] for shape in shapes.values() if shape and isinstance(shape[0], str)}
    scaled = {name: dimensions[name] for name in first if dimensions.get(name, 1) % batch_size == 0}
    samples = _samples(graph, [n for name, n in dimensions.items() if name not in scaled]) if scaled else 0
    own = {name: size // batch_size * samples for name, size in scaled.items()}
    sizes = input_sizes(graph, {**dimensions, **own})
    facts = find_value_facts(graph, sizes)
    plan = plan_context(graph, size, facts.shapes, facts.numbers, samples)
    batch = samples or next((shape[0] for shape in sizes.values() if shape), 1)
    return plan, facts, batch


def _samples(graph: TrainingGraph, others: Sequence[int]) -> int:
    """A prime number of samples that no other size of the model, or one next to it, is a multiple of; 0: none is."""
    stored = {int(n) for v in graph.model.graph.initializers.values() for n in v.shape or () if isinstance(n, int)}
    given = {n for v in graph.model.graph.inputs for n in v.shape or () if isinstance(n, int)} | {*others}
    known = stored | {near for n in given for near in (n - 1, n, n + 1)}
    return next((p for p in _PRIMES if all(n % p for n in known if n)), 0)
