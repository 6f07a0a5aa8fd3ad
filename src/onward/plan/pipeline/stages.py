"""Pipeline stages: which nodes, weights and inputs each has, and which values travel from one to the next.

Only neighbors talk: what a later stage needs is relayed through those between. Weights that several stages read (tied
embeddings) are on each of them; `shared_weights` says whose gradients have to be summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onward.errors import ModelError, ParametersError
from onward.graph.cuts import reads
from onward.graph.nodes.provenance import shown_node
from onward.graph.training_graph import TrainingGraph
from onward.plan.roles import ValueRoles, find_roles, node_id


@dataclass(frozen=True)
class Transfer:
    """A value that travels between neighboring stages.

    Attributes:
        name: of the value.
        with_gradient: whether a gradient travels back.
        comes_from: the stage that computes it.
    """

    name: str
    with_gradient: bool
    comes_from: int


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What one stage of the pipeline computes.

    Attributes:
        index: its number, from 0.
        nodes: by the name of their first output, in the order of the graph.
        repeated: those of them that other stages compute, too: masks, positions, shapes.
        weights: trained weights that it reads, in the order of the graph.
        states: running statistics that it updates.
        inputs: inputs of the network that it reads.
        received: values from the stage before, in the order in which they travel.
        sent: values for the stage after.
        outputs: outputs of the network that it computes; the last stage's hold the loss.
    """

    index: int
    nodes: tuple[str, ...]
    repeated: tuple[str, ...]
    weights: tuple[str, ...]
    states: tuple[str, ...]
    inputs: tuple[str, ...]
    received: tuple[Transfer, ...]
    sent: tuple[Transfer, ...]
    outputs: tuple[str, ...]

    @property
    def relayed(self) -> tuple[str, ...]:
        """What it only passes on."""
        received = {transfer.name for transfer in self.received}
        return tuple(transfer.name for transfer in self.sent if transfer.name in received)


@dataclass(frozen=True)
class StagePlan:
    """A network cut into stages.

    Attributes:
        stages: first to last.
        stage_of_node: stage of every node that is computed on one stage only, by the name of its first output.
        shared_weights: weights that several stages hold, with these stages; the first of them owns the weight where
            it must count once (norms, checkpoints).
    """

    stages: tuple[Stage, ...]
    stage_of_node: Mapping[str, int] = field(repr=False)
    shared_weights: Mapping[str, tuple[int, ...]]

    def __len__(self) -> int:
        return len(self.stages)


def plan_stages(
    graph: TrainingGraph, stage_of: Mapping[ir.Node, int], stage_count: int, roles: ValueRoles | None = None
) -> StagePlan:
    """Completes an assignment of nodes to stages by what each stage needs, receives and sends.

    Args:
        graph: with its loss.
        stage_of: stage of every bound node.
        stage_count: how many stages there are.
        roles: of the graph's nodes, where they are known already.

    Raises:
        ModelError: a value that would have to be sent is no tensor, or running statistics are updated on two stages.
        ParametersError: a value goes backward, the loss is not on the last stage, or a stage has nothing to do.
    """
    roles = roles or find_roles(graph)
    routes = _Routes(roles, stage_of, stage_count)
    received = routes.find_transfers()
    stages = [_make_stage(graph, routes, received, index) for index in range(stage_count)]
    _check(graph, stages)
    of_node = {node_id(node): stage for node, stage in stage_of.items()}
    return StagePlan(tuple(stages), of_node, _shared_weights(graph, stages))


class _Routes:
    """Finds what has to travel, given the stage of every bound node.

    A light value made from shapes alone is recomputed where those tensors are at hand; elsewhere it travels.
    """

    def __init__(self, roles: ValueRoles, stage_of: Mapping[ir.Node, int], stage_count: int) -> None:
        self.roles = roles
        self.stage_of = stage_of
        self.stage_count = stage_count
        self.received: list[set[ir.Value]] = [set() for _ in range(stage_count)]

    def home(self, value: ir.Value) -> int | None:
        """The stage that computes a value; None for what every stage can compute."""
        node = self.roles.producers.get(value)
        if node is None:
            return None
        if node in self.roles.bound:
            return self.stage_of[node]
        homes = [self.stage_of[self.roles.producers[root]] for root in self.roles.roots[node]]
        return max(homes, default=None)

    def outputs_of(self, stage: int) -> list[ir.Value]:
        """The network's outputs that a stage computes; those that every stage could, the last does."""
        last = self.stage_count - 1
        homes = [(value, self.home(value)) for value in self.roles.outputs]
        return [value for value, home in homes if (last if home is None else home) == stage]

    def find_transfers(self) -> list[set[ir.Value]]:
        """For every stage, the values that it receives."""
        needed = [(value, self.stage_of[node], node) for node in self.roles.nodes if node in self.roles.bound
                  for value in reads(node)]  # fmt: skip
        for value, stage, node in needed:
            producer = self.roles.producers.get(value)
            if producer in self.roles.bound:
                self._receive(value, self.stage_of[producer], stage, node)
        for stage in range(self.stage_count):
            for output in self.outputs_of(stage):
                self._bring_shapes(output, stage, self.roles.producers.get(output))
        for value, stage, node in needed:
            self._bring_shapes(value, stage, node)
        return self.received

    def _bring_shapes(self, value: ir.Value, stage: int, reader: ir.Node | None) -> None:
        """Lets a stage have a light value that was made from shapes of bound ones."""
        node = self.roles.producers.get(value)
        if node is None or node in self.roles.bound or not self.roles.roots[node]:
            return
        if value in self.received[stage]:
            return
        homes = {root: self.stage_of[self.roles.producers[root]] for root in self.roles.roots[node]}
        if all(home == stage or root in self.received[stage] for root, home in homes.items()):
            return
        last = max(homes.values())
        if last == stage:
            for inner in reads(node):
                self._bring_shapes(inner, stage, node)
        else:
            self._receive(value, last, stage, reader or node)
            self._bring_shapes(value, last, node)

    def _receive(self, value: ir.Value, home: int, stage: int, reader: ir.Node) -> None:
        if home > stage:
            producer = self.roles.producers[value]
            raise ParametersError(
                f"the stages go backward: {value.name!r}, which node {shown_node(producer)!r} "
                f"computes on stage {home}, is read by node {shown_node(reader)!r} on stage {stage}. "
                "Values are sent forward only: move one of the two nodes."
            )
        if home < stage and not _is_tensor(value):
            raise ModelError(
                f"{value.name!r} is a {value.type or 'value without a known type'}, not a tensor, and would have "
                f"to be sent from stage {home} to stage {stage}; cut the network elsewhere."
            )
        for index in range(home + 1, stage + 1):
            self.received[index].add(value)

    def closure(self, stage: int) -> tuple[set[ir.Node], set[ir.Value]]:
        """The nodes of a stage, and the inputs and initializers that they read."""
        sent = self.received[stage + 1] if stage + 1 < self.stage_count else set()
        stack = [*self.outputs_of(stage), *sent]
        nodes: set[ir.Node] = set()
        leaves: set[ir.Value] = set()
        while stack:
            value = stack.pop()
            if value in self.received[stage]:
                continue
            node = self.roles.producers.get(value)
            if node is None:
                leaves.add(value)
            elif node not in nodes:
                nodes.add(node)
                stack.extend(reads(node))
        return nodes, leaves


def _is_tensor(value: ir.Value) -> bool:
    return (value.type is None or isinstance(value.type, ir.TensorType)) and value.dtype is not ir.DataType.STRING


def _make_stage(graph: TrainingGraph, routes: _Routes, received: Sequence[set[ir.Value]], index: int) -> Stage:
    roles = routes.roles
    nodes, leaves = routes.closure(index)
    names = {str(value.name) for value in leaves}
    order = {value: place for place, value in enumerate(v for node in roles.nodes for v in node.outputs)}

    def transfers(values: Iterable[ir.Value]) -> tuple[Transfer, ...]:
        return tuple(
            Transfer(str(value.name), value in roles.with_gradient, routes.home(value) or 0)
            for value in sorted(values, key=order.__getitem__)
        )

    return Stage(
        index=index,
        nodes=tuple(node_id(node) for node in roles.nodes if node in nodes),
        repeated=tuple(node_id(node) for node in roles.nodes if node in nodes and node not in roles.bound),
        weights=tuple(name for name in graph.weights if name in names),
        states=tuple(name for name in graph.states if name in names),
        inputs=tuple(str(v.name) for v in graph.model.graph.inputs if v in leaves and not v.is_initializer()),
        received=transfers(received[index]),
        sent=transfers(received[index + 1]) if index + 1 < len(received) else (),
        outputs=tuple(str(value.name) for value in routes.outputs_of(index)),
    )


def _shared_weights(graph: TrainingGraph, stages: Sequence[Stage]) -> dict[str, tuple[int, ...]]:
    holders = {name: tuple(s.index for s in stages if name in s.weights) for name in graph.weights}
    return {name: found for name, found in holders.items() if len(found) > 1}


def _check(graph: TrainingGraph, stages: Sequence[Stage]) -> None:
    for stage in stages:
        if not stage.nodes:
            raise ParametersError(
                f"stage {stage.index} of {len(stages)} computes nothing. Give it nodes, or use fewer stages."
            )
        if stage.index and not stage.received:
            raise ParametersError(
                f"stage {stage.index} of {len(stages)} receives nothing from the stages before it, so the loss does "
                "not depend on them. Cut elsewhere."
            )
    _check_loss(graph, stages)
    for name in graph.states:
        holders = [stage.index for stage in stages if name in stage.states]
        if len(holders) > 1:
            raise ModelError(
                f"the running statistic {name!r} is updated on stages {', '.join(map(str, holders))}; the nodes that "
                "read it must be on one stage."
            )


def _check_loss(graph: TrainingGraph, stages: Sequence[Stage]) -> None:
    if graph.loss is None:
        raise ModelError("the graph has no loss; a pipeline is planned for a graph that is to be trained.")
    if graph.loss not in stages[-1].outputs:
        home = next(stage.index for stage in stages if graph.loss in stage.outputs)
        raise ParametersError(
            f"the loss {graph.loss!r} is computed on stage {home}, but the last stage is {len(stages) - 1}. The last "
            "stage must hold the loss: cut before it."
        )
