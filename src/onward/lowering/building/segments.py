"""A program cut into a chain of smaller ones, the code of one segment each: units of sharding and of recompute.

Which node belongs to which segment comes from outside; a value that a later segment reads is handed on by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from onward.lowering.building.tensor_facts import FACT
from onward.lowering.program import Nested, Program, name_placeholders


@dataclass(frozen=True, kw_only=True)
class SegmentedProgram:
    """The code of a graph in segments.

    Attributes:
        segments: one program each, in order; the inputs of each are inputs of the graph or values (`%name`) that
            earlier segments have as outputs.
        inputs: of the graph.
        outputs: names of the graph's outputs.
        results: for every output, the input, the tensor or the value of a segment that it is.
        folded: tensors of the program's own that are outputs themselves: computed from constants, once.
    """

    segments: tuple[Program, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    results: tuple[str, ...]
    folded: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def dropped(self) -> tuple[tuple[str, ...], ...]:
        """For every segment, the inputs that nothing needs after it."""
        last = {name: index for index, segment in enumerate(self.segments) for name in segment.inputs}
        return tuple(
            tuple(name for name in segment.inputs if last[name] == index and name not in self.results)
            for index, segment in enumerate(self.segments)
        )

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that any segment reads, or that are outputs themselves."""
        read = [name for segment in self.segments for name in segment.tensors]
        return tuple(dict.fromkeys((*read, *(name for name in self.results if self._is_tensor(name)))))

    def _is_tensor(self, name: str) -> bool:
        return name not in self.inputs and name not in self.folded and not name.startswith("%")


def split_program(
    program: Program, segment_of: Mapping[str, int], count: int, *, hands_on_tensors_alone: bool = False
) -> SegmentedProgram:
    """Cuts a program where its nodes change segment.

    Args:
        program: general or specialized.
        segment_of: name of an ONNX node -> its segment; what it does not list goes where its inputs are.
        count: number of segments; those of which nothing is left in this program are empty.
        hands_on_tensors_alone: whether every segment computes shapes and sizes that it reads itself.
    """
    placeholders = [node for node in program.code.graph.nodes if node.op == "placeholder"]
    names = dict(zip(placeholders[2:], (*program.inputs, *program.tensors), strict=True))
    places = _places(program.code.graph, segment_of, count)
    output = next(node for node in program.code.graph.nodes if node.op == "output")
    results = tuple(names.get(node, f"%{node.name}") for node in output.args[0])
    nodes_of: list[list[fx.Node]] = [[] for _ in range(count)]
    for node, place in places.items():
        nodes_of[place].append(node)
    if hands_on_tensors_alone:
        nodes_of = [_with_host_values(nodes, places) for nodes in nodes_of]
    builders = [_SegmentBuilder(program, placeholders, names, nodes) for nodes in nodes_of]
    handed_on = {value for builder in builders for value in builder.values} | set(output.all_input_nodes)
    folded = {name: tensor for name, tensor in program.attribute_tensors.items() if name in results}
    return SegmentedProgram(
        segments=tuple(builder.cut(handed_on) for builder in builders),
        inputs=program.inputs,
        outputs=program.outputs,
        results=results,
        folded=folded,
    )


def _places(graph: fx.Graph, segment_of: Mapping[str, int], count: int) -> dict[fx.Node, int]:
    """The segment of every node: its own, but never before that of what it reads."""
    places: dict[fx.Node, int] = {}
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    for node in calls:
        label = node.meta.get("onnx")
        wanted = 0 if label is None else segment_of.get(label.name, 0)
        places[node] = max((places[source] for source in node.all_input_nodes if source in places), default=wanted)
        places[node] = min(max(places[node], wanted), count - 1)
    for node in reversed(calls):
        # A nested graph is data of the call that runs it: the tensors it reads must be seen to enter the segment.
        if node.target is Nested or node.op == "get_attr":
            places[node] = min((places[user] for user in node.users if user in places), default=places[node])
    return places


def _with_host_values(nodes: Sequence[fx.Node], places: Mapping[fx.Node, int]) -> list[fx.Node]:
    """The nodes of a segment, and those of others that compute the numbers it reads."""
    needed, stack = set(nodes), list(nodes)
    while stack:
        more = [n for n in stack.pop().all_input_nodes if n.meta.get("is_host") and n not in needed]
        needed.update(more)
        stack += more
    return list(nodes) if len(needed) == len(nodes) else [node for node in places if node in needed]


class _SegmentBuilder:
    """Builds the program of one segment."""

    def __init__(
        self,
        program: Program,
        placeholders: Sequence[fx.Node],
        names: Mapping[fx.Node, str],
        nodes: Sequence[fx.Node],
    ) -> None:
        self.program = program
        self.placeholders = placeholders
        self.names = names
        self.nodes = nodes
        own = set(nodes)
        read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in own)
        self.values = [n for n in read if n not in names and n not in placeholders[:2]]
        self.inputs = [n for n in read if names.get(n) in program.inputs]
        self.tensors = [n for n in read if n in names and names[n] not in program.inputs]

    def cut(self, handed_on: Collection[fx.Node]) -> Program:
        """The program: its inputs are graph inputs, then values of earlier segments."""
        results = [node for node in self.nodes if node in handed_on]
        graph, copies = fx.Graph(), dict[fx.Node, Any]()
        for node in (*self.placeholders[:2], *self.inputs, *self.values, *self.tensors):
            copies[node] = graph.placeholder(node.name)
            copies[node].meta.update((key, value) for key, value in node.meta.items() if key == FACT)
        for node in self.nodes:
            copies[node] = graph.node_copy(node, lambda source: copies[source])
        graph.output(tuple(copies[node] for node in results))
        graph.eliminate_dead_code()
        name_placeholders(graph)
        tensors = tuple(self.names[node] for node in self.tensors)
        attributes = {name: t for name, t in self.program.attribute_tensors.items() if name in tensors}
        return Program(
            code=fx.GraphModule(self.program.code, graph),
            inputs=(*(self.names[node] for node in self.inputs), *(f"%{node.name}" for node in self.values)),
            tensors=tensors,
            outputs=tuple(f"%{node.name}" for node in results),
            attribute_tensors=attributes,
        )


def run_chain(
    program: SegmentedProgram, inputs: Mapping[str, Any], run: Callable[[int, tuple[Any, ...]], tuple[Any, ...]]
) -> dict[str, Any]:
    """What is left of inputs and values when all segments have run; each is dropped before its last reader runs.

    Args:
        program: whose segments.
        inputs: of the graph, by name.
        run: runs one segment, given its number and its inputs.
    """
    values = {**inputs, **program.folded}
    for index, segment in enumerate(program.segments):
        given = tuple(values[name] for name in segment.inputs)
        for name in program.dropped[index]:
            del values[name]
        results = run(index, given)
        del given
        values.update(zip(segment.outputs, results, strict=True))
    return values


def run_segments(
    program: SegmentedProgram,
    training: bool,
    device: torch.device,
    inputs: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
) -> tuple[Any, ...]:
    """The results of the segments, one run after the other."""
    values = run_chain(program, inputs, lambda index, given: program.segments[index](training, device, given, tensors))
    return tuple(values[name] if name in values else tensors[name] for name in program.results)
