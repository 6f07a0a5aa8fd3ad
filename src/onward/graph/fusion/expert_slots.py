"""Mixtures whose tokens the model itself puts into slots of experts (GShard, Switch Transformer, soft mixtures).

The model multiplies its tokens with a mask `[tokens, experts, slots]`, computes every expert of its slots, and
multiplies back. What is between the two, all experts of all slots, becomes one node `Experts` without choices: the
capacity and the rule by which tokens are dropped stay those of the graph, whatever they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onward.graph.fusion.contributed_experts import KIND
from onward.graph.fusion.expert_axes import Atom, Axes, Meaning, labels
from onward.graph.fusion.expert_body import Body, Formula, read_body, stacked_weights
from onward.graph.fusion.expert_reading import ExpertReader
from onward.graph.fusion.rewriting import Editor, readers, stored_behind
from onward.graph.nodes.known_values import Size, integer
from onward.graph.nodes.provenance import shown_node
from onward.graph.operators import Fact, operators_with

_MOVING = operators_with(Fact.SAME_ELEMENTS) | {"Cast"}
_PICKING = ("Gather", "GatherND", "GatherElements", "ScatterND", "ScatterElements")
_MOST_VALUES = 40
"""Looked at for every expert."""


class SlotReader(ExpertReader):
    """Reads what experts compute of their slots; `E` is an axis of all values, or one expert is picked.

    Args:
        editor: of the graph.
        rows: what is in the slots.
        expert_axis, feature_axis: of the rows.
    """

    def __init__(self, editor: Editor, rows: ir.Value, expert_axis: int, feature_axis: int) -> None:
        self.editor, self.facts, self.obstacle = editor, editor.facts, None
        shape = editor.facts.shape(rows) or ()
        experts = shape[expert_axis]
        assert isinstance(experts, int)
        self.experts, self.choices, self.sizes = experts, 0, ()
        named = {expert_axis: "E", feature_axis: "F"}
        axes = tuple(_axis(named.get(place, f"N{place}"), size) for place, size in enumerate(shape))
        self.tokens = axes
        self.found = {rows: Meaning("body", axes, Formula(kind="tokens", value=rows))}

    def _leaf(self, value: ir.Value) -> Meaning | None:
        """Weights; there is no other input than the slots."""
        return super()._leaf(value) if value.is_initializer() else None

    def _pick(self, source: Meaning, axis: int, number: int, group: tuple[()] | None) -> Meaning | None:
        found = super()._pick(source, axis, number, group)
        if found is not None or source.kind != "body" or source.data.kind != "tokens" or source.expert is not None:
            return found
        if labels((source.axes[axis],)) != ["E"]:
            return None
        axes = (*source.axes[:axis], *(() if group is None else (group,)), *source.axes[axis + 1 :])
        return Meaning("body", axes, source.data, number % self.experts)

    def stack_of(self, parts: list[Meaning], axis: int) -> Meaning | None:
        """What the experts give, each of its slots, in their order."""
        in_order = [part.expert for part in parts] == list(range(self.experts))
        if not in_order or any(p.kind != "body" or p.axes != parts[0].axes for p in parts) or parts[0].axes[axis]:
            return None
        axes = (*parts[0].axes[:axis], (Atom("E", self.experts),), *parts[0].axes[axis + 1 :])
        return Meaning("stack", axes, [part.data for part in parts])


def _axis(label: str, size: Size | None) -> tuple[Atom, ...]:
    return () if size == 1 else (Atom(label, size),)


def fuse_slots(editor: Editor) -> None:
    """Replaces what all experts compute of slots that tokens were put into."""
    for node in editor.nodes("MatMul", "Einsum", "Split", "Gather"):
        for rows, expert_axis, feature_axis in _candidates(editor, node):
            shape = editor.facts.shape(rows)
            if shape is None or len(shape) < 3 or not isinstance(shape[expert_axis], int) or shape[expert_axis] == 1:
                continue
            if node.graph is editor.graph and _are_routed(rows) and expert_axis != feature_axis:
                _fuse(editor, SlotReader(editor, rows, expert_axis, feature_axis), rows)


def _candidates(editor: Editor, node: ir.Node) -> Iterator[tuple[ir.Value, int, int]]:
    """Values that may be rows of experts at a node that reads them, with their axes of experts and of features."""
    first = node.inputs[0]
    shape = None if first is None else editor.facts.shape(first)
    if node.op_type in ("Split", "Gather"):
        if first is not None and shape is not None and not first.is_initializer():
            yield first, integer(node, "axis", 0) % len(shape), len(shape) - 1
        return
    if len(node.inputs) != 2:
        return
    for index, (value, other) in enumerate((node.inputs, node.inputs[::-1])):
        rank = None if value is None else editor.facts.rank(value)
        if value is None or other is None or rank is None:
            continue
        for place in _expert_axes(editor, other):
            if node.op_type == "Einsum":
                yield from _of_einsum(node, index, place)
            elif (axis := rank - (editor.facts.rank(other) or 0) + place) >= 0:
                yield value, axis, rank - 1 - index


def _of_einsum(node: ir.Node, index: int, place: int) -> Iterator[tuple[ir.Value, int, int]]:
    terms, _, result = node.attributes["equation"].as_string().replace(" ", "").partition("->")
    letters = terms.split(",")
    own, other, value = letters[index], letters[1 - index], node.inputs[index]
    summed = [c for c in own if c in other and c not in result]
    if value is not None and len(summed) == 1 and "." not in terms and other[place] in own and other[place] in result:
        yield value, own.index(other[place]), own.index(summed[0])


def _stack_behind(value: ir.Value | None) -> ir.Value | None:
    """The weights, one matrix for each expert, that a value moves."""
    stored = stored_behind(value, _MOVING)
    if stored is None or stored.const_value is None:
        return None
    return stored if sum(size != 1 for size in stored.const_value.shape) == 3 else None


def _expert_axes(editor: Editor, moved: ir.Value) -> list[int]:
    """The axes of a moved stack of weights that may count experts."""
    stored, shape = _stack_behind(moved), editor.facts.shape(moved)
    if stored is None or stored.const_value is None or shape is None:
        return []
    return [place for place, size in enumerate(shape[:-1]) if size == stored.const_value.shape[0]]


def _are_routed(rows: ir.Value) -> bool:
    """Whether rows come from a product of activations, or are picked or put in places that depend on data."""
    value: ir.Value | None = rows
    while value is not None and (node := value.producer()) is not None:
        if node.op_type in _PICKING:
            index = node.inputs[1]
            return index is not None and not index.is_initializer()
        if node.op_type in ("MatMul", "Einsum"):
            return all(given is not None and _stack_behind(given) is None and not given.is_initializer()
                       for given in node.inputs)  # fmt: skip
        if node.op_type not in _MOVING:
            return False
        value = node.inputs[0]
    return False


def _fuse(editor: Editor, reader: SlotReader, rows: ir.Value) -> None:
    after = _values_after(reader, rows)
    found = [one for value in after if (one := _complete(reader, rows, value)) is not None]
    if not found:
        if (reason := _reason(reader, rows)) is not None:
            editor.missed.append(reason)
        return
    best = max(found, key=lambda one: one.steps)
    nodes = _nodes_before(best.value, set(after))
    if best.value.name not in editor.kept and editor.are_interior(nodes, best.value):
        _write(editor, reader, rows, best, len(nodes))


def _reason(reader: SlotReader, rows: ir.Value) -> str | None:
    """Why the slots of single experts stay; a stack of weights alone is no mixture yet."""
    bodies = (m for m in reader.found.values() if m is not None and m.kind == "body" and m.expert is not None)
    begun = {body.expert for body in bodies if any(step.kind == "linear" for step in body.data.steps())}
    node = rows.producer()
    if len(begun) < reader.experts or node is None:
        return None
    return (
        f"a mixture of {reader.experts} experts, whose tokens are put into slots at {shown_node(node)}, stays as it is "
        "exported, and its experts cannot be shared among ranks: they are not all the same feed-forward layer, each of "
        "its own weights, in order. docs/explanation/fusion.md lists the forms that become one node."
    )


@dataclass(frozen=True, kw_only=True)
class _Complete:
    """What all experts compute of their slots.

    Attributes:
        value, axes: of the graph.
        body, weights: of the experts.
        steps: how many they take.
    """

    value: ir.Value
    axes: Axes
    body: Body
    weights: list[list[ir.Value]]
    steps: int


def _complete(reader: SlotReader, rows: ir.Value, value: ir.Value) -> _Complete | None:
    """What a value is, if it is the result of all experts with the axes of the rows."""
    meaning = reader.meaning(value)
    if meaning is None or meaning.kind not in ("body", "stack") or meaning.expert is not None:
        return None
    formulas: Sequence[Formula] = [meaning.data] if meaning.kind == "body" else meaning.data
    bodies = [body for formula in formulas if (body := read_body(formula)) is not None]
    if len(bodies) < len(formulas) or bodies[0].tokens is not rows or bodies[0].scales_input:
        return None
    axes = meaning.axes
    has_all = len(axes) == len(reader.tokens) and sorted(labels(axes)) == sorted(labels(reader.tokens))
    weights = stacked_weights(bodies, reader.experts)
    if weights is None or not has_all or any(len(group) > 1 for group in axes) or not _features(bodies[0], reader):
        return None
    steps = sum(1 for _ in formulas[0].steps())
    return _Complete(value=value, axes=axes, body=bodies[0], weights=weights, steps=steps)


def _features(body: Body, reader: SlotReader) -> int:
    """How many features an expert has between its layers; 0: not known."""
    down = body.layers[-1].weight
    size = (reader.facts.shape(down.value) or (None, None))[-1 if down.rows_are_outputs else -2]
    return size if isinstance(size, int) else 0


def _values_after(reader: SlotReader, rows: ir.Value) -> list[ir.Value]:
    """The values that are computed of the slots and have a meaning, nearest first."""
    found, queue = dict[ir.Value, None](), [rows]
    while queue and len(found) < _MOST_VALUES * (reader.experts + 1):
        outputs = (output for node in readers(queue.pop(0)) for output in node.outputs)
        new = [value for value in outputs if value not in found and reader.meaning(value) is not None]
        found |= dict.fromkeys(new)
        queue += new
    return list(found)


def _nodes_before(result: ir.Value, after: Collection[ir.Value]) -> list[ir.Node]:
    """The nodes that compute a result from such values."""
    found, waiting = dict[ir.Node, None](), [result]
    while waiting:
        value = waiting.pop()
        node = value.producer()
        if value in after and node is not None and node not in found:
            found[node] = None
            waiting += [given for given in node.inputs if given is not None]
    return list(found)


def _write(editor: Editor, reader: SlotReader, rows: ir.Value, found: _Complete, count: int) -> None:
    """The node, of rows whose axes are experts, slots and features in this order."""
    node = found.value.producer()
    assert node is not None
    given = reader.tokens
    order = sorted(range(len(given)), key=lambda place: _rank_of(given[place]))
    sorted_axes = tuple(given[place] for place in order)
    moved = rows if sorted_axes == given else editor.write("Transpose", [rows], node, name=KIND, perm=order)
    output = editor.write(
        "Experts",
        [moved, None, None, *(value for values in found.weights for value in values)],
        node,
        fused=True,
        name=KIND,
        experts=reader.experts,
        hidden=_features(found.body, reader),
        **found.body.attributes(),
    )
    back = _permutation(sorted_axes, found.axes)
    if back != sorted(back):
        output = editor.write("Transpose", [output], node, name=KIND, perm=back)
    about = f"{reader.experts} experts, each of the slots that the model fills"
    editor.replace(found.value, output, KIND, count, about)


def _rank_of(group: tuple[Atom, ...]) -> int:
    return {"E": 0, "F": 2}.get(group[0].label if group else "", 1)


def _permutation(source: Axes, target: Axes) -> list[int]:
    """Which axis of the source each axis of the target is; those of size 1 in any order."""
    left = dict(enumerate(labels((group,)) for group in source))
    found = []
    for group in target:
        place = next(place for place, own in left.items() if own == labels((group,)))
        del left[place]
        found.append(place)
    return found
