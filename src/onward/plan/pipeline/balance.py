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
from onward.graph.weights.quantization import is_only_dequantized
from onward.plan.costs.costs import OPERATIONS_PER_BYTE, GraphCosts, measure_costs
from onward.plan.roles import ValueRoles, find_roles, node_id

MOST_PLACES = 1500
"""Places to cut that are looked at; of more, the cheapest in each stretch of equal cost."""

BYTES_MOVED_PER_BYTE_SENT = 8.0
"""How many bytes move within a rank's memory in the time in which one reaches another rank (HBM against NVLink)."""

TOLERATED_IMBALANCE = 0.02
"""By how much of the best time the slowest stage may be slower where that sends less, as between entire blocks."""

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
        sent_bytes: of it, forward.
        trained: at each place, how many nodes before it read a trained weight.
        weight_bytes, kept_bytes: of the nodes before each place.
    """

    nodes: tuple[ir.Node, ...]
    places: np.ndarray
    cost: np.ndarray
    sent: np.ndarray
    sent_bytes: np.ndarray
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
    micro_batches: int = 1,
) -> dict[ir.Node, int]:
    """The stage of every bound node, so that the slowest stage is nearly as fast as can be, and little is sent.

    Of all ways whose slowest stage takes at most `TOLERATED_IMBALANCE` longer than in the fastest way, the one that
    sends least is taken; of several that send about as much, the fastest. Exact for the places looked at, by dynamic
    programming over (stages so far, place).

    Args:
        graph: the network with its loss.
        stage_count: how many stages to make.
        roles: of the graph's nodes, where they are known already.
        costs: of the graph's nodes; by default those at `DEFAULT_SIZE`.
        memory_limit_bytes: no stage may need more for weights, gradients, moments, kept activations and buffers.
        micro_batches_held: stage -> how many micro-batches' activations it holds at once under the schedule.
        micro_batches: of an update; a stage has a buffer for what it receives of each.

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
    ways = _Ways(line, memory_limit_bytes, micro_batches_held, micro_batches)
    fastest = ways.fastest(stage_count)
    chosen = ways.least_sent(stage_count, fastest * (1 + TOLERATED_IMBALANCE))
    return {
        node: int(np.searchsorted(line.places[chosen], index, side="right")) for index, node in enumerate(line.nodes)
    }


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
        sent_bytes=live[places],
        trained=trained[places],
        weight_bytes=np.cumsum([0.0, *fresh])[places],
        kept_bytes=kept[places],
    )


_NEVER_SENT = 1e15
"""Bytes, more than anything else costs."""


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
        # Integers carry no gradient from stage to stage: what is quantized is dequantized in the same stage.
        size += _NEVER_SENT if is_only_dequantized(value) else 0.0
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


@dataclass(frozen=True)
class _Ways:
    """All ways to cut a line into stages within a memory limit."""

    line: _Line
    limit_bytes: float | None
    held: Callable[[int], int]
    micro_batches: int

    def fastest(self, stage_count: int) -> float:
        """What the slowest stage costs in the way in which it costs least.

        Raises:
            ParametersError: no way stays below the memory limit.
        """
        slowest = np.full(len(self.line.places), np.inf)
        slowest[0] = 0.0
        for stage in range(stage_count):
            before, slowest = slowest, np.full(len(slowest), np.inf)
            for end in range(1, len(slowest)):
                slowest[end] = np.maximum(before[:end], self._costs(stage, end)).min()
        if not np.isfinite(slowest[-1]):
            raise ParametersError(
                f"no way to cut the network into {stage_count} stages keeps each below "
                f"{(self.limit_bytes or 0) / 1e9:.2f} GB; use more stages, a smaller batch, or recompute."
            )
        return float(slowest[-1])

    def least_sent(self, stage_count: int, bound: float) -> np.ndarray:
        """The indices in `line.places` of the cuts that send least while no stage costs more than `bound`."""
        count = len(self.line.places)
        # In eighths of a power of two: what is sent counts where it differs by a tenth.
        price = 2.0 ** (np.round(8.0 * np.log2(np.maximum(self.line.sent_bytes, 1.0))) / 8.0)
        price[-1] = 0.0
        slowest, traffic = np.full((2, stage_count + 1, count), np.inf)
        came_from = np.zeros((stage_count + 1, count), dtype=np.int64)
        slowest[0, 0] = traffic[0, 0] = 0.0
        for stage in range(stage_count):
            for end in range(1, count):
                cost = self._costs(stage, end)
                sent = np.where(cost <= bound, traffic[stage, :end] + price[end], np.inf)
                worst = np.where(sent <= sent.min(), np.maximum(slowest[stage, :end], cost), np.inf)
                best = came_from[stage + 1, end] = int(worst.argmin())
                slowest[stage + 1, end], traffic[stage + 1, end] = worst[best], sent[best]
        chosen = [count - 1]
        for stage in range(stage_count, 0, -1):
            chosen.append(int(came_from[stage, chosen[-1]]))
        return np.array(chosen[-2:0:-1], dtype=np.int64)

    def _costs(self, stage: int, end: int) -> np.ndarray:
        """What a stage costs that ends at a place, by the place where it begins; infinite where it cannot."""
        line = self.line
        cost = line.cost[end] - line.cost[:end] + line.sent[:end] + line.sent[end]
        cost = np.where(line.trained[end] > line.trained[:end], cost, np.inf)
        if self.limit_bytes is not None:
            memory = (line.weight_bytes[end] - line.weight_bytes[:end]) * MEMORY_COPIES
            memory = memory + (line.kept_bytes[end] - line.kept_bytes[:end]) * self.held(stage)
            memory = memory + (line.sent_bytes[:end] + line.sent_bytes[end]) * self.micro_batches
            cost = np.where(memory <= self.limit_bytes, cost, np.inf)
        return cost
