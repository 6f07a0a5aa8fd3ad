"""What a micro-batch costs, with the shapes of a run on fake tensors where ONNX's inference finds none."""

from __future__ import annotations

from collections.abc import Mapping

from onward.engine.building.sizes import input_sizes
from onward.graph.training_graph import TrainingGraph
from onward.lowering.building.shapes import find_value_facts
from onward.plan.costs.costs import GraphCosts, measure_costs
from onward.plan.roles import ValueRoles


def known_costs(
    graph: TrainingGraph,
    dimensions: Mapping[str, int],
    roles: ValueRoles | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> GraphCosts:
    """As `measure_costs`; a matmul behind a fused node whose shape is guessed could count a wrong batch 64 times.

    Args:
        graph: the network with its loss.
        dimensions: symbolic dimension of the inputs -> size.
        roles, shapes: of the graph, where they are known already.

    Raises:
        ParametersError: the size of a dimension of the inputs is not known.
    """
    costs = measure_costs(graph, dimensions, roles, shapes)
    if not costs.guessed:
        return costs
    return traced_costs(graph, dimensions, roles)


def traced_costs(graph: TrainingGraph, dimensions: Mapping[str, int], roles: ValueRoles | None = None) -> GraphCosts:
    """As `measure_costs`, with the shapes of a run on fake tensors; arguments and errors are those of `known_costs`."""
    return measure_costs(graph, dimensions, roles, find_value_facts(graph, input_sizes(graph, dimensions)).shapes)
