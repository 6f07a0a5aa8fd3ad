"""Where to cut when nobody says: stages of equal cost, little to send between them, none above a memory limit.

Any place in the order of the nodes can be cut, since everything alive there is relayed; the price of a place is what
would have to be sent. Between the layers of most networks that is a single tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onward.errors import ParametersError
from onward.graph.cuts import reads
from onward.graph.training_graph import TrainingGraph
from onward.plan.costs.costs import OPERATIONS_PER_BYTE, GraphCosts, measure_costs
from onward.plan.roles import ValueRoles, find_roles, node_id

MOST_PLACES = 1500
"""Places to cut that are looked at; of more, the cheapest in each stretch of equal cost."""

BYTES_MOVED_PER_BYTE_SENT = 8.0
"""How many bytes move within a rank's memory in the time in which one reaches another rank (HBM against NVLink)."""

MEMORY_COPIES = 4.0
"""Weight, gradient and two moments."""


@dataclass(frozen=True, kw_only=True)
class _Line:
    """The bound nodes in order, with sums up to each place between two of them.

    Attributes:
        nodes: in topological order.
        places: how many nodes are before each place that may be cut; 0 and all of them at the ends.
        cost: of all nodes before each place, forward and backward.
        sent: cost of what travels across each place.
        trained: at each place, how many nodes before it read a trained weight.
        weight_bytes, kept_bytes: of the nodes before each place.
    """

    nodes: tuple[ir.Node, ...]
    places: np.ndarray
    cost: np.ndarray
    sent: np.ndarray
    trained: np.ndarray
    weight_bytes: np.ndarray
    kept_bytes: np.ndarray


def balanced_stages(
    graph: TrainingGraph,
    stage_count: int,
    roles: ValueRoles | None = None,
    costs: GraphCosts | None = None,
    *,
    memory_limit_bytes: float | None = None,
    micro_batches_held: Callable[[int], int] = lambda stage: 1,
) -> dict[ir.Node, int]:
    """The stage of every bound node, so that the slowest stage is as fast as can be.

    Among equally fast ways the one that sends least is taken. Exact for the places looked at, by dynamic programming
    over (stages so far, place).

    Args:
        graph: the network with its loss.
        stage_count: how many stages to make.
        roles: of the graph's nodes, where they are known already.
        costs: of the graph's nodes; by default those at `DEFAULT_SIZE`.
        memory_limit_bytes: no stage may need more for weights, gradients, moments and kept activations.
        micro_batches_held: stage -> how many micro-batches' activations it holds at once under the schedule.

    Raises:
        ParametersError: there are fewer places to cut than it takes, or no way stays below the memory limit.
    """
    roles = roles or find_roles(graph)
    costs = costs or measure_costs(graph, {}, roles)
    line = _lay_out(graph, roles, costs)
    most = _most_stages(line)
    if stage_count > most:
        raise ParametersError(
            f"the network can be cut into {most} stages at most, each with a weight to train; pipeline_parallel_size "
            f"and stages_per_rank ask for {stage_count}. Use {most} or fewer."
        )
    chosen = _choose(line, stage_count, memory_limit_bytes, micro_batches_held)
    return {
        node: int(np.searchsorted(line.places[chosen], index, side="right")) for index, node in enumerate(line.nodes)
    }


def largest_stage_count(graph: TrainingGraph) -> int:
    """Into how many stages a network can be cut, each with a weight to train."""
    roles = find_roles(graph)
    return _most_stages(_lay_out(graph, roles, measure_costs(graph, {}, roles)))


def _lay_out(graph: TrainingGraph, roles: ValueRoles, costs: GraphCosts) -> _Line:
    weights = frozenset(graph.weights)
    nodes = tuple(node for node in roles.nodes if node in roles.bound)
    position = {node: index for index, node in enumerate(nodes)}
    time = [costs.nodes[node_id(node)].time for node in nodes]
    total = np.cumsum([0.0, *(t.forward + t.backward_input + t.backward_weight for t in time)])
    read = [roles.weights_of(node, weights) for node in nodes]
    trained = np.cumsum([0, *(bool(names) for names in read)])
    seen: set[str] = set()
    fresh = []
    for names in read:
        fresh.append(sum(costs.weight_bytes[name] for name in names - seen))
        seen |= names
    kept = np.cumsum([0.0, *(costs.nodes[node_id(node)].kept_bytes for node in nodes)])
    live = _live_bytes(roles, costs, nodes, position)
    # Forward an activation, backward its gradient.
    sent = live * 2.0 * OPERATIONS_PER_BYTE * BYTES_MOVED_PER_BYTE_SENT
    places = _places(nodes, total, sent, trained)
    return _Line(
        nodes=nodes,
        places=places,
        cost=total[places],
        sent=sent[places],
        trained=trained[places],
        weight_bytes=np.cumsum([0.0, *fresh])[places],
        kept_bytes=kept[places],
    )


def _live_bytes(
    roles: ValueRoles, costs: GraphCosts, nodes: Sequence[ir.Node], position: dict[ir.Node, int]
) -> np.ndarray:
    """At each place, the bytes of all bound values computed before and read after it."""
    change = np.zeros(len(nodes) + 2)
    last = len(nodes) - 1
    end: dict[ir.Value, int] = {}
    for node in nodes:
        for value in reads(node):
            producer = roles.producers.get(value)
            if producer in position:
                end[value] = max(end.get(value, 0), position[node])
    for value, reader in end.items():
        producer = roles.producers[value]
        size = costs.value_bytes.get(str(value.name), 0.0)
        change[position[producer] + 1] += size
        change[min(reader, last) + 1] -= size
    return np.cumsum(change)[: len(nodes) + 1]


def _places(nodes: Sequence[ir.Node], total: np.ndarray, sent: np.ndarray, trained: np.ndarray) -> np.ndarray:
    """Of the places with the same trained weights on either side, those that send least; thinned out if too many."""
    inner = np.arange(1, len(nodes))
    inner = inner[(trained[1:-1] > 0) & (trained[1:-1] < trained[-1])]
    kept: dict[int, int] = {}
    for place in inner:
        group = int(trained[place])
        # Later is better at equal price: what follows a layer (activation, norm) then stays with it.
        if group not in kept or sent[place] <= sent[kept[group]]:
            kept[group] = int(place)
    chosen = np.array(sorted(kept.values()), dtype=np.int64)
    if len(chosen) > MOST_PLACES:
        buckets = np.searchsorted(np.linspace(0.0, float(total[-1]), MOST_PLACES), total[chosen])
        best: dict[int, int] = {}
        for place, bucket in zip(chosen, buckets, strict=True):
            if int(bucket) not in best or sent[place] <= sent[best[int(bucket)]]:
                best[int(bucket)] = int(place)
        chosen = np.array(sorted(best.values()), dtype=np.int64)
    return np.concatenate([[0], chosen, [len(nodes)]]).astype(np.int64)


def _most_stages(line: _Line) -> int:
    return len(line.places) - 1 if line.trained[-1] else 0


def _choose(line: _Line, stage_count: int, limit: float | None, held: Callable[[int], int]) -> np.ndarray:
    """The indices in `line.places` of the cuts of the best way."""
    count = len(line.places)
    slowest = np.full((stage_count + 1, count), np.inf)
    traffic = np.full((stage_count + 1, count), np.inf)
    came_from = np.zeros((stage_count + 1, count), dtype=np.int64)
    slowest[0, 0] = traffic[0, 0] = 0.0
    for stage in range(stage_count):
        for end in range(1, count):
            begin = np.arange(end)
            cost = line.cost[end] - line.cost[begin] + line.sent[begin] + line.sent[end]
            cost = np.where(line.trained[end] > line.trained[begin], cost, np.inf)
            if limit is not None:
                memory = (line.weight_bytes[end] - line.weight_bytes[begin]) * MEMORY_COPIES
                memory = memory + (line.kept_bytes[end] - line.kept_bytes[begin]) * held(stage)
                cost = np.where(memory <= limit, cost, np.inf)
            worst = np.maximum(slowest[stage, :end], cost)
            best = worst.min()
            if not np.isfinite(best):
                continue
            ties = np.where(worst <= best * (1 + 1e-9), traffic[stage, :end] + line.sent[end], np.inf)
            came_from[stage + 1, end] = int(ties.argmin())
            slowest[stage + 1, end], traffic[stage + 1, end] = best, ties.min()
    if not np.isfinite(slowest[stage_count, -1]):
        raise ParametersError(
            f"no way to cut the network into {stage_count} stages keeps each below {(limit or 0) / 1e9:.2f} GB; use "
            "more stages, a smaller batch, or recompute."
        )
    chosen = []
    place = count - 1
    for stage in range(stage_count, 0, -1):
        place = int(came_from[stage, place])
        chosen.append(place)
    return np.array(sorted(chosen[:-1]), dtype=np.int64)
