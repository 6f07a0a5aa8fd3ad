"""Stages as the user names them: the original's cut lists, a stage for every node, or stages noted on the nodes."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onward.errors import ParametersError
from onward.graph.cuts import reads
from onward.graph.losses.writer import PREFIX as LOSS_PREFIX
from onward.graph.nodes.provenance import shown_node
from onward.graph.training_graph import TrainingGraph
from onward.plan.roles import ValueRoles, node_id
from onward.spelling import shortened

STAGE_NOTE = "onward.stage"
"""Key in a node's metadata under which joining stage models notes the stage."""

CutNumbers = Mapping[tuple[ir.Value, ir.Node], tuple[int, int]]
"""(value, reader) -> the first and the last cut that the value crosses on its way there."""

_CUTS = "distributed.pipeline_partition_cut_list"


@dataclass(frozen=True)
class CutEdge:
    """A tensor that goes from one side of a cut to the other, to these consumers (none: to all it has)."""

    tensor: str
    consumers: tuple[str, ...] = ()


def parse_cut_list(
    cuts: str | Sequence[str], tensors: Collection[str], consumers: Collection[str]
) -> tuple[tuple[CutEdge, ...], ...]:
    """Reads a cut list: cuts separated by commas (or given one by one), in each tensors separated by `:`, each alone
    or as `tensor-consumer/consumer`.

    Names may hold the separators themselves: of the readings in which every name is known, the one with the longest
    tensor names is taken.

    Args:
        cuts: as in `distributed.pipeline_partition_cut_list`.
        tensors: names of all values of the graph.
        consumers: names of all nodes, and of their outputs.

    Raises:
        ParametersError: a name is unknown.
    """
    texts = [cut.strip() for cut in (cuts.split(",") if isinstance(cuts, str) else cuts)]
    parsed = []
    for number, text in enumerate(texts):
        edges = _read_edges(text, frozenset(tensors), frozenset(consumers))
        if edges is None:
            raise ParametersError(_what_is_unknown(number, text, tensors, consumers))
        parsed.append(edges)
    return tuple(parsed)


def _read_edges(text: str, tensors: frozenset[str], consumers: frozenset[str]) -> tuple[CutEdge, ...] | None:
    for end in _ends(text, ":"):
        edge = _read_edge(text[:end], tensors, consumers)
        if edge is None:
            continue
        if end == len(text):
            return (edge,)
        rest = _read_edges(text[end + 1 :], tensors, consumers)
        if rest is not None:
            return (edge, *rest)
    return None


def _read_edge(text: str, tensors: frozenset[str], consumers: frozenset[str]) -> CutEdge | None:
    for end in _ends(text, "-"):
        if text[:end] not in tensors:
            continue
        if end == len(text):
            return CutEdge(text)
        named = _read_consumers(text[end + 1 :], consumers)
        if named is not None:
            return CutEdge(text[:end], named)
    return None


def _read_consumers(text: str, consumers: frozenset[str]) -> tuple[str, ...] | None:
    for end in _ends(text, "/"):
        if text[:end] not in consumers:
            continue
        if end == len(text):
            return (text,)
        rest = _read_consumers(text[end + 1 :], consumers)
        if rest is not None:
            return (text[:end], *rest)
    return None


def _ends(text: str, separator: str) -> list[int]:
    """Where a name at the start of the text may end, the longest first."""
    return [len(text), *(i for i in range(len(text) - 1, 0, -1) if text[i] == separator)]


def _what_is_unknown(number: int, text: str, tensors: Collection[str], consumers: Collection[str]) -> str:
    where = f"{_CUTS}: cut {number} ({text!r})"
    for edge in text.split(":"):
        tensor, dash, rest = edge.partition("-")
        if tensor not in tensors and edge not in tensors:
            return f"{where} names the tensor {tensor!r}, which the model does not have{_near(tensor, tensors)}"
        for consumer in rest.split("/") if dash else ():
            if consumer not in consumers:
                what = f"the consumer {consumer!r}, which is no node of the model"
                return f"{where} names {what}{_near(consumer, consumers)}"
    return f"{where} cannot be read; expected `tensor` or `tensor-consumer/consumer`, several separated by `:`."


def _near(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; did you mean {', '.join(map(repr, near))}?" if near else "; `onward inspect` lists the names."


def stages_by_cut_list(
    graph: TrainingGraph, roles: ValueRoles, cuts: str | Sequence[str], stage_count: int
) -> dict[ir.Node, int]:
    """The stage of every bound node, by cutting edges: what still hangs together is one stage.

    Cut number i is between stages i and i+1: its tensors are computed on stage i or before, and the consumers it
    names are on stage i+1 or later. Edges from masks, positions and the like may be named; they cut nothing, since
    every stage computes these for itself.

    Raises:
        ParametersError: the list has not one cut fewer than there are stages, names what is unknown, goes backward,
            does not separate what it cuts, or leaves nodes without a stage.
    """
    main = graph.model.graph
    by_name = _nodes_by_name(main)
    values = {str(v.name): v for v in (*main.inputs, *main.initializers.values())}
    values |= {str(v.name): v for node in main for v in node.outputs}
    parsed = parse_cut_list(cuts, values.keys(), by_name.keys())
    if len(parsed) != stage_count - 1:
        raise ParametersError(
            f"{_CUTS} holds {len(parsed)} cuts, which make {len(parsed) + 1} stages; pipeline_parallel_size and "
            f"stages_per_rank ask for {stage_count}, which takes {stage_count - 1} cuts."
        )
    cut_edges: dict[tuple[ir.Value, ir.Node], tuple[int, int]] = {}
    for number, edges in enumerate(parsed):
        for edge in edges:
            value = values[edge.tensor]
            for node in _consumers_of(number, edge, value, by_name):
                lowest, _ = cut_edges.get((value, node), (number, number))
                cut_edges[(value, node)] = (lowest, number)
    components = _components(roles, cut_edges)
    return _place(roles, components, cut_edges, stage_count)


def _consumers_of(number: int, edge: CutEdge, value: ir.Value, by_name: Mapping[str, ir.Node]) -> Iterable[ir.Node]:
    if not edge.consumers:
        return [use.node for use in value.uses()]
    found = []
    for name in edge.consumers:
        if value not in set(reads(by_name[name])):
            readers = ", ".join(repr(shown_node(use.node)) for use in value.uses()) or "none"
            raise ParametersError(
                f"{_CUTS}: cut {number} names {name!r} as a consumer of {edge.tensor!r}, but that node does not read "
                f"it; its consumers are {readers}."
            )
        found.append(by_name[name])
    return found


def _nodes_by_name(main: ir.Graph) -> dict[str, ir.Node]:
    """Nodes by the names of their outputs, and by their own where no output has that name."""
    found = {str(value.name): node for node in main for value in node.outputs if value.name}
    for node in main:
        if node.name:
            found.setdefault(node.name, node)
    return found


def _edges(roles: ValueRoles) -> Iterable[tuple[ir.Node, ir.Value, ir.Node]]:
    """(producer, value, reader) between bound nodes."""
    for node in roles.nodes:
        if node in roles.bound:
            for value in dict.fromkeys(reads(node)):
                producer = roles.producers.get(value)
                if producer is not None and producer in roles.bound:
                    yield producer, value, node


def _components(roles: ValueRoles, cut_edges: CutNumbers) -> dict[ir.Node, ir.Node]:
    """Assigned nodes -> one node of their connected component of the graph without the cut edges."""
    parent = {node: node for node in roles.bound}

    def find(node: ir.Node) -> ir.Node:
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for producer, value, reader in _edges(roles):
        if (value, reader) not in cut_edges:
            parent[find(reader)] = find(producer)
    return {node: find(node) for node in parent}


def _place(
    roles: ValueRoles,
    components: Mapping[ir.Node, ir.Node],
    cut_edges: CutNumbers,
    stage_count: int,
) -> dict[ir.Node, int]:
    """A stage for every component: as early as its inputs allow; one without any, as late as its readers allow."""
    earliest: dict[ir.Node, tuple[int, ir.Value]] = {}
    latest: dict[ir.Node, tuple[int, ir.Value]] = {}
    for producer, value, reader in _edges(roles):
        numbers = cut_edges.get((value, reader))
        if numbers is None:
            continue
        lowest, highest = numbers
        before, after = components[producer], components[reader]
        if before is after:
            _refuse_connected(roles, cut_edges, lowest, value)
        if after not in earliest or earliest[after][0] < highest + 1:
            earliest[after] = (highest + 1, value)
        if before not in latest or latest[before][0] > lowest:
            latest[before] = (lowest, value)
    stages: dict[ir.Node, int] = {}
    for component in set(components.values()):
        first, last = earliest.get(component), latest.get(component)
        if first is not None and last is not None and first[0] > last[0]:
            raise ParametersError(
                f"{_CUTS} goes backward: cut {first[0] - 1} puts the readers of {first[1].name!r} on stage {first[0]} "
                f"or later, but {last[1].name!r}, which is computed with them, is cut by cut {last[0]} and so "
                f"belongs to stage {last[0]} or before. Put the cuts in the order of the network."
            )
        if first is None and last is None and stage_count > 1:
            _refuse_left_out(roles, components, component)
        stages[component] = first[0] if first is not None else last[0] if last is not None else 0
    unused = sorted(set(range(stage_count)) - set(stages.values()))
    if unused:
        raise ParametersError(
            f"{_CUTS} leaves stage {unused[0]} of {stage_count} without nodes: no tensor leads from cut "
            f"{unused[0] - 1} to cut {unused[0]}. Each cut must split the network in two."
        )
    return {node: stages[component] for node, component in components.items()}


def _refuse_left_out(roles: ValueRoles, components: Mapping[ir.Node, ir.Node], component: ir.Node) -> None:
    members = [node for node in roles.nodes if components.get(node) is component]
    if len(members) == len(components):
        raise ParametersError(
            f"{_CUTS} cuts nothing: every tensor it names depends on the network's inputs alone or on weights alone, "
            "which each stage has for itself. Name a tensor between two layers."
        )
    raise ParametersError(
        f"{_CUTS} leaves node {shown_node(members[0])!r} and {len(members) - 1} more out: no cut "
        "leads to them or from them, so that their stage is not known. Add a tensor that connects them to a cut."
    )


def _refuse_connected(roles: ValueRoles, cut_edges: CutNumbers, number: int, value: ir.Value) -> None:
    """Names what goes around a cut: values that nodes beyond it read from nodes before it."""
    beyond = {reader for (_, reader), (lowest, highest) in cut_edges.items() if lowest <= number <= highest}
    crossing: dict[str, ir.Node] = {}
    for producer, _, reader in _edges(roles):
        if producer in beyond:
            beyond.add(reader)
    for producer, passed, reader in _edges(roles):
        if reader in beyond and producer not in beyond and (passed, reader) not in cut_edges:
            crossing.setdefault(str(passed.name), reader)
    shown = shortened((f"{name!r} (read by {shown_node(node)!r})" for name, node in crossing.items()), 5)
    raise ParametersError(
        f"{_CUTS}: cut {number} cuts {value.name!r}, but its two sides are still connected through {shown}. "
        "Add that to the cut."
    )


def stages_by_name(
    graph: TrainingGraph, roles: ValueRoles, op_id_to_stage: Mapping[str, int], stage_count: int
) -> dict[ir.Node, int]:
    """The stage of every bound node, from names of nodes or of any of their outputs.

    Nodes that the loss and other passes added, and those that every stage computes for itself, need not be named: they
    are where what they read is.

    Raises:
        ParametersError: a name is unknown, a stage is out of range or unused, or bound nodes are not named.
    """
    field = "distributed.op_id_to_stage"
    by_name, own = _nodes_by_name(graph.model.graph), _nodes_by_name(graph.source.graph)
    found: dict[ir.Node, int] = {}
    for name, stage in op_id_to_stage.items():
        if name in own and name not in by_name:
            continue  # a pass removed it, as what only inference needs
        if name not in by_name:
            raise ParametersError(f"{field} names {name!r}, which is no node of the model{_near(name, by_name)}")
        if not 0 <= stage < stage_count:
            raise ParametersError(
                f"{field} puts {name!r} on stage {stage}; pipeline_parallel_size and stages_per_rank make "
                f"{stage_count} stages, numbered from 0."
            )
        node = by_name[name]
        if found.setdefault(node, stage) != stage:
            raise ParametersError(
                f"{field} puts node {name!r} on stage {stage} and on stage {found[node]}; choose one."
            )
    missing = []
    for node in roles.nodes:
        if node in roles.bound and node not in found:
            if str(node.name or node_id(node)).startswith(LOSS_PREFIX):
                found[node] = stage_count - 1
            elif node_id(node) not in own and (node.name or "") not in own:
                sources = (roles.producers.get(value) for value in reads(node))
                found[node] = max((found[source] for source in sources if source in found), default=0)
            else:
                missing.append(shown_node(node))
    if missing:
        shown = ", ".join(map(repr, missing[:5])) + (", ..." if len(missing) > 5 else "")
        raise ParametersError(f"{field} leaves {len(missing)} nodes out: {shown}. Give each of them a stage.")
    unused = sorted(set(range(stage_count)) - {found[node] for node in roles.bound})
    if unused:
        raise ParametersError(f"{field} puts no node on stage {unused[0]} of {stage_count}.")
    return {node: found[node] for node in roles.bound}


def stages_by_note(graph: TrainingGraph, roles: ValueRoles, stage_count: int) -> dict[ir.Node, int]:
    """The stage of every bound node, from what `join_stage_models` noted on the nodes; the loss is on the last.

    Raises:
        ParametersError: there are more or fewer stages than asked for.
    """
    noted = {node: node.metadata_props.get(STAGE_NOTE) for node in roles.nodes}
    models = 1 + max((int(note) for note in noted.values() if note is not None), default=-1)
    found = {node: stage_count - 1 if note is None else int(note) for node, note in noted.items()}
    if models != stage_count:
        raise ParametersError(
            f"distributed.pipeline_stage_paths names {models} models, but pipeline_parallel_size and "
            f"stages_per_rank ask for {stage_count} stages."
        )
    return {node: found[node] for node in roles.bound}
