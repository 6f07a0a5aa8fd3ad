"""`NetworkWork`: a network as the search sees it, a line of operators with a few numbers each, counted once.

All layouts are priced from these arrays; none of them looks at the graph again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onward.graph.cuts import reads
from onward.graph.fusion.cross_entropy import FUSED_LOSS
from onward.graph.fusion.rewriting import DOMAIN
from onward.graph.training_graph import TrainingGraph
from onward.plan.costs.costs import GraphCosts
from onward.plan.horizontal.cuts import unlimited
from onward.plan.horizontal.planning import HorizontalPlan
from onward.plan.roles import ValueRoles, node_id
from onward.plan.search.loss_scores import computed_nodes, kept_by_loss, makers_of_scores, reads_scores

Numbers = NDArray[np.float64]

KEPT = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Shares of activations that are kept, from the fastest to the smallest: the first that fits is the best."""

MOST_PLACES = 400
"""Places where a pipeline may be cut that are looked at; of more, those where least is sent."""

CHUNK_ROWS = 256
"""Of logits that the fused loss holds at once, on a CPU at least (`lowering/ops/fused_cross_entropy.py`)."""


@dataclass(frozen=True, kw_only=True)
class NetworkWork:
    """Operators in order, blocks between the places where a pipeline may be cut, and what ranks could share.

    Per operator and sample, in the element type of the file:

    Attributes:
        block: the block that it is in, ascending.
        forward, backward: operations of matmuls and convolutions.
        moved: bytes of activations that the forward pass reads and writes.
        kept: bytes that it keeps for the backward pass.
        kept_exactly: of the kept bytes that it reads or writes, those that are float32 in any precision: of a loss.
        kept_once: bytes that it keeps for any number of samples: the gradient of the last layer's weight where the loss
            is taken a chunk of rows at a time.
        made: bytes of its output.
        made_once: half of the bytes of the logits of a chunk of rows, where the loss is taken so.
        read: bytes of weights that it reads, for any number of samples.
        is_differentiated: whether a gradient passes through it.
        is_split: whether tensor-parallel ranks share its work.
        is_token_split: whether they share it with `sequence_parallel`.
        is_ahead: whether the forward pass computes its gradients, too: a loss that is taken by chunks, with its layer.
        trained, trained_split: elements of the trainable weights that it is the first to read; those of them that
            tensor-parallel ranks share.
        frozen: bytes of other tensors that it is the first to read.
        of_experts: those of the trained elements that are weights of experts.
        exchanged: bytes of tokens that replicas send to each other's experts, there and back, forward and backward.
        reduced_forward, reduced_backward: bytes that tensor-parallel ranks all-reduce for it.
        sent: bytes alive after the last operator of each block, which a pipeline cut there sends.
        is_narrow: after which blocks a single activation is alive, so that recompute can begin there.
        tied: elements of weights that are read far apart, with the first and the last block that reads each.
        tensor_sizes: of tensor parallelism that the network can be shared by in this form.
        token_size: numbers of ranks that divide this can share tokens (`sequence_parallel`); 1: they cannot be shared.
        context_sizes: numbers of context ranks that can share its sequences.
        context_share: of the elements of its activations that they share.
        gathered: bytes of keys and values that each of them gathers for a sample.
        attentions: how often it does.
        expert_sizes: numbers of replicas that can share the experts.
        width: bytes of an element of its activations.
        kept_shares: of its activations that recompute can be asked to keep.
    """

    block: NDArray[np.int64]
    forward: Numbers
    backward: Numbers
    moved: Numbers
    kept: Numbers
    kept_exactly: Numbers
    kept_once: Numbers
    made: Numbers
    made_once: Numbers
    read: Numbers
    is_differentiated: NDArray[np.bool_]
    is_split: NDArray[np.bool_]
    is_token_split: NDArray[np.bool_]
    is_ahead: NDArray[np.bool_]
    trained: Numbers
    trained_split: Numbers
    frozen: Numbers
    reduced_forward: Numbers
    reduced_backward: Numbers
    sent: Numbers
    is_narrow: NDArray[np.bool_]
    tied: tuple[tuple[float, int, int], ...] = ()
    tensor_sizes: tuple[int, ...] = (1,)
    token_size: int = 1
    context_sizes: tuple[int, ...] = ()
    context_share: float = 0.0
    gathered: float = 0.0
    attentions: int = 0
    of_experts: Numbers | None = None
    exchanged: Numbers | None = None
    expert_sizes: tuple[int, ...] = ()
    width: float = 4.0
    kept_shares: tuple[float, ...] = KEPT

    @property
    def blocks(self) -> int:
        """How many there are."""
        return len(self.sent)

    @property
    def passes_back(self) -> NDArray[np.bool_]:
        """Which operators read and write as much twice again in the backward pass."""
        found: NDArray[np.bool_] = self.is_differentiated & ~(self.is_ahead & (self.forward == 0))
        return found

    @property
    def weights(self) -> float:
        """Trainable elements."""
        return float(self.trained.sum())

    def operations(self, samples: int) -> float:
        """Of the model for so many samples, forward and backward, recomputation left out."""
        return float(self.forward.sum() + self.backward.sum()) * samples

    def of_blocks(self, values: Numbers) -> Numbers:
        """Sums over the operators of each block."""
        return np.bincount(self.block, values, self.blocks).astype(np.float64)


def count_work(
    graph: TrainingGraph,
    costs: GraphCosts,
    roles: ValueRoles,
    horizontal: HorizontalPlan,
    *,
    tensor_sizes: tuple[int, ...],
    token_size: int,
    batch: int,
    expert_sizes: tuple[int, ...] = (),
) -> NetworkWork:
    """The summary of a network.

    Args:
        graph: with its loss.
        costs: of a micro-batch.
        roles: of its nodes.
        horizontal: how any of `tensor_sizes` ranks share it.
        tensor_sizes, token_size, expert_sizes: of `NetworkWork`.
        batch: samples of the micro-batch that `costs` are for.
    """
    nodes = [node for node in roles.nodes if node in roles.bound]
    ends, sent, narrow = _places(nodes, roles, costs, frozenset(graph.weights))
    block = np.searchsorted(ends, np.arange(len(nodes)), side="right")
    found = [costs.nodes[node_id(node)] for node in nodes]
    weights = _Weights(graph, costs, roles, horizontal, nodes)
    read = np.array([weights.bytes_read(node) for node in nodes])
    split, by_tokens, forward_bytes, backward_bytes = _shares(nodes, costs, horizontal)
    trained, trained_split, frozen = weights.first_read(nodes)
    computed = computed_nodes(graph, nodes, horizontal)
    chunked = {node for node in nodes if node.op_type == FUSED_LOSS and not reads_scores(node, computed)}
    kept_once = np.array([weights.kept_once(node) if node in chunked else 0.0 for node in nodes])
    kept_exactly = np.array([0.0 if node in chunked else kept_by_loss(node, costs) for node in nodes])
    losses = [nodes[place] for place in np.flatnonzero(kept_exactly)]
    scores = {one for node in losses for one in makers_of_scores(node)}
    kept = np.array([one.kept_bytes * (node not in scores) for node, one in zip(nodes, found, strict=True)])
    # Of scores that ranks share the softmax, which is kept, and its gradient are all that is there.
    held = computed - scores if any(node_id(node) in horizontal.edits for node in losses) else computed
    made = np.array([costs.nodes[node_id(node)].output_bytes * (node in held) for node in nodes])
    made_once = [weights.bytes_of_chunk(node) if node in chunked else 0.0 for node in nodes]
    return NetworkWork(
        block=block,
        forward=np.array([one.forward for one in found]) / batch,
        backward=np.array([one.backward_input + one.backward_weight for one in found]) / batch,
        moved=np.maximum(np.array([one.moved_bytes for one in found]) - read, 0.0) / batch,
        kept=(kept + kept_exactly) / batch,
        kept_exactly=kept_exactly / batch,
        kept_once=kept_once,
        made=made / batch,
        made_once=np.array(made_once),
        read=read,
        is_differentiated=np.array([any(v in roles.with_gradient for v in node.outputs) for node in nodes], dtype=bool),
        is_split=split,
        is_token_split=by_tokens,
        is_ahead=np.array([node in chunked or node not in computed for node in nodes]),
        trained=trained,
        trained_split=trained_split,
        frozen=frozen,
        reduced_forward=forward_bytes / batch,
        reduced_backward=backward_bytes / batch,
        sent=np.concatenate([sent, [0.0]]) / batch,
        is_narrow=np.concatenate([narrow, [False]]),
        tied=weights.tied(nodes, block),
        tensor_sizes=tensor_sizes,
        token_size=token_size,
        expert_sizes=expert_sizes,
        of_experts=np.array([weights.of_experts(node) for node in nodes]) if expert_sizes else None,
        exchanged=np.array([_exchanged(node, costs) for node in nodes]) / batch if expert_sizes else None,
        width=width_of(graph),
    )


def is_mixture(node: ir.Node) -> bool:
    """Whether a node is a mixture of experts."""
    return node.domain == DOMAIN and node.op_type == "Experts"


def _exchanged(node: ir.Node, costs: GraphCosts) -> float:
    """Bytes of the tokens of a mixture, once for each expert they choose: there and back, forward and backward."""
    if not is_mixture(node):
        return 0.0
    slots, shares, first = node.inputs[0], node.inputs[2], node.inputs[3]
    assert slots is not None
    assert first is not None
    if shares is None:
        return 4.0 * costs.value_bytes.get(str(slots.name), 0.0)
    assert first.const_value is not None
    rows, columns = (int(size) for size in first.const_value.shape.numpy()[-2:])
    width = columns if node.attributes["rows_are_outputs"].as_int() else rows
    return 4.0 * costs.value_bytes.get(str(shares.name), 0.0) * width


def _places(
    nodes: list[ir.Node], roles: ValueRoles, costs: GraphCosts, trained: frozenset[str]
) -> tuple[NDArray[np.int64], Numbers, NDArray[np.bool_]]:
    """Where blocks end, what is sent there, and where that is a single activation.

    Of places with the same trained weights on either side the last of those that send least, as the plan has them.
    """
    position = {node: index for index, node in enumerate(nodes)}
    alive, count = np.zeros(len(nodes) + 1), np.zeros(len(nodes) + 1)
    last: dict[ir.Value, int] = {}
    for node in nodes:
        for value in reads(node):
            if roles.producers.get(value) in position:
                last[value] = position[node]
    for value, reader in last.items():
        first, size = position[roles.producers[value]], costs.value_bytes.get(str(value.name), 0.0)
        alive[first] += size
        alive[reader] -= size
        count[first] += 1
        count[reader] -= 1
    alive, count = np.cumsum(alive), np.cumsum(count)
    before = np.cumsum([bool(roles.weights_of(node, trained)) for node in nodes])
    best: dict[int, int] = {}
    for place in range(len(nodes) - 1):
        group = int(before[place])
        if 0 < group < before[-1] and (group not in best or alive[place] <= alive[best[group]]):
            best[group] = place
    chosen = np.array(sorted(best.values()), dtype=np.int64)
    if len(chosen) > MOST_PLACES:
        chosen = np.sort(chosen[np.argsort(alive[chosen], kind="stable")[:MOST_PLACES]])
    return chosen + 1, alive[chosen], count[chosen] == 1


def _shares(
    nodes: list[ir.Node], costs: GraphCosts, plan: HorizontalPlan
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], Numbers, Numbers]:
    """Which operators tensor-parallel ranks share, also by tokens, and bytes that they all-reduce for each."""
    reduced, entries = frozenset(plan.reduced), set(plan.entries)
    split, by_tokens = np.zeros(len(nodes), dtype=bool), np.zeros(len(nodes), dtype=bool)
    forward, backward = np.zeros(len(nodes)), np.zeros(len(nodes))
    entered: set[str] = set()
    for place, node in enumerate(nodes):
        made = [str(value.name) for value in node.outputs]
        names = {*made, *(str(value.name) for value in node.inputs if value is not None)}
        split[place] = made[0] in reduced or any(name in plan.values for name in names)
        by_tokens[place] = split[place] or any(name in plan.token_axes for name in made)
        if made[0] in reduced:
            forward[place] = costs.value_bytes.get(made[0], 0.0)
        for index, value in enumerate(node.inputs):
            name = "" if value is None else str(value.name)
            if (made[0], index) in entries and name not in entered:
                entered.add(name)  # the gradient of a value is reduced once, however many regions read it
                backward[place] += costs.value_bytes.get(name, 0.0)
    return split, by_tokens, forward, backward


class _Weights:
    """The initializers of a network: who reads which."""

    def __init__(
        self,
        graph: TrainingGraph,
        costs: GraphCosts,
        roles: ValueRoles,
        horizontal: HorizontalPlan,
        nodes: list[ir.Node],
    ) -> None:
        initializers = graph.model.graph.initializers
        self._trained = frozenset(graph.weights)
        self._plan, self._roles = horizontal, roles
        self._stored = {
            name: value.const_value for name, value in initializers.items() if value.const_value is not None
        }
        self._bytes = {**costs.value_bytes, **{name: float(one.nbytes) for name, one in self._stored.items()}}
        self._read: dict[ir.Node, set[str]] = {}
        known = frozenset(self._stored)
        for node in nodes:
            self._read[node] = roles.weights_of(node, known)

    def bytes_read(self, node: ir.Node) -> float:
        """Of matrices and kernels; a lookup reads no table."""
        if node.op_type.startswith("Gather"):
            return 0.0
        names = [str(value.name) for value in node.inputs if value is not None and self._is_weight(value)]
        return sum((self._bytes.get(name, 0.0) for name in names), 0.0)

    def kept_once(self, node: ir.Node) -> float:
        """Of a loss that is taken by chunks, whose forward pass adds up the gradient of its weight in float32."""
        return 4.0 * sum(float(self._stored[name].size) for name in self._read[node] & self._trained)

    def bytes_of_chunk(self, node: ir.Node) -> float:
        """Half of the float32 logits that such a loss holds at once: in place they become their gradient."""
        widest = max((max(self._stored[name].shape.numpy()) for name in self._read[node]), default=0)
        return 2.0 * CHUNK_ROWS * widest

    def _is_weight(self, value: ir.Value) -> bool:
        """Whether a value is a weight, or follows from weights alone, as a transposed one does."""
        producer = self._roles.producers.get(value)
        if producer is None:
            return value.is_initializer()
        return producer not in self._roles.bound and bool(self._roles.weights_of(producer, self._trained))

    def first_read(self, nodes: list[ir.Node]) -> tuple[Numbers, Numbers, Numbers]:
        """Elements of trained weights, of shared ones, and bytes of frozen tensors, by their first reader."""
        trained, split, frozen = (np.zeros(len(nodes)) for _ in range(3))
        seen: set[str] = set()
        for place, node in enumerate(nodes):
            for name in self._read[node] - seen:
                size = float(self._stored[name].size)
                if name in self._trained:
                    trained[place] += size
                    cut = self._plan.shardings.get(name)
                    # A rank's share of what is split is the same for all: blocks that few ranks share are left out.
                    split[place] += 0.0 if cut is None else size * sum(unlimited(cut)) / sum(cut.blocks)
                else:
                    frozen[place] += float(self._stored[name].nbytes)
            seen |= self._read[node]
        return trained, split, frozen

    def of_experts(self, node: ir.Node) -> float:
        """Elements of the experts' weights that a mixture reads."""
        names = [str(value.name) for value in node.inputs[3:] if value is not None] if is_mixture(node) else []
        return float(sum(self._stored[name].size for name in names if name in self._trained))

    def tied(self, nodes: list[ir.Node], block: NDArray[np.int64]) -> tuple[tuple[float, int, int], ...]:
        """Trained weights that several blocks read."""
        found: dict[str, tuple[int, int]] = {}
        for node, place in zip(nodes, block.tolist(), strict=True):
            for name in self._read[node] & self._trained:
                found[name] = (found.get(name, (place, place))[0], place)
        return tuple((float(self._stored[name].size), *ends) for name, ends in found.items() if ends[0] != ends[1])


def width_of(graph: TrainingGraph) -> float:
    """Bytes of an element of most trained weights, and so of most activations."""
    initializers, sizes = graph.model.graph.initializers, dict[float, int]()
    for stored in (initializers[name].const_value for name in graph.weights if name in initializers):
        if stored is not None:
            sizes[float(stored.dtype.itemsize)] = sizes.get(float(stored.dtype.itemsize), 0) + stored.size
    return max(sizes, key=lambda size: sizes[size], default=4.0)
