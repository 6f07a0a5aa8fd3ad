"""Sequences of tensors that are only taken apart again: a split into a sequence becomes a plain `Split`.

torch's exporter writes `split` and `chunk` so; parts that are tensors of their own can be cut, fused and sent.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from onward.graph.nodes.known_values import KnownValues, integer
from onward.graph.nodes.node_writer import NodeWriter

_SIZES_ARE_INPUT_SINCE = 13

MOST_PARTS = 10_000
"""Of a `Split` written for a sequence; a sequence of more stays one, and takes memory only where it is computed."""


def unpack_sequences(model: ir.Model, keep: Collection[str] = ()) -> None:
    """Replaces `SplitToSequence` and the `SequenceAt`s that read it by `Split`, in place.

    The parts keep their names. It needs sizes and positions that are known, and no reader of the entire sequence.

    Args:
        model: prepared for lowering.
        keep: names of values and nodes that must stay.
    """
    splits = [node for node in model.graph if (node.domain, node.op_type) == ("", "SplitToSequence")]
    if not splits:
        return
    facts, writer = KnownValues(model, ()), NodeWriter(model, "")
    for node in splits:
        sizes = _sizes(facts, node)
        positions = None if sizes is None else _positions(facts, node, len(sizes))
        names = {node.name, node.outputs[0].name, *(at.name for at in positions or ())}
        if sizes is not None and positions is not None and names.isdisjoint(keep):
            _write_split(model, writer, node, sizes, positions)


def _sizes(facts: KnownValues, node: ir.Node) -> tuple[int, ...] | None:
    """The sizes of the parts, as far as they are always the same."""
    source, given = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    if source is None or (given is None and not integer(node, "keepdims", 1)):
        return None
    numbers = (1,) if given is None else facts.numbers(given)
    if numbers is None:
        return None
    if given is not None and facts.rank(given) == 1:
        return numbers
    shape = facts.shape(source)
    total = None if shape is None else shape[integer(node, "axis", 0)]
    if not isinstance(total, int) or numbers[0] < 1 or total // numbers[0] > MOST_PARTS:
        return None
    return tuple(min(numbers[0], total - begin) for begin in range(0, total, numbers[0]))


def _positions(facts: KnownValues, node: ir.Node, count: int) -> dict[ir.Node, int] | None:
    """Each reader of the sequence with the part that it takes; None if one reads it otherwise."""
    sequence = node.outputs[0]
    found = {}
    for use in sequence.uses():
        reader = use.node
        if (reader.domain, reader.op_type) != ("", "SequenceAt") or reader.graph is not node.graph:
            return None
        numbers = facts.numbers(reader.inputs[1])
        if numbers is None or not -count <= numbers[0] < count:
            return None
        found[reader] = numbers[0] % count
    is_once = len(set(found.values())) == len(found) > 0  # one part cannot have the names of two
    return found if is_once and not sequence.is_graph_output() else None


def _write_split(
    model: ir.Model, writer: NodeWriter, node: ir.Node, sizes: Sequence[int], positions: dict[ir.Node, int]
) -> None:
    stem = str(node.outputs[0].name)
    outputs = [ir.Value(name=writer.unique(f"{stem}_part")) for _ in sizes]
    inputs, attributes = [node.inputs[0]], [ir.AttrInt64("axis", integer(node, "axis", 0))]
    if model.opset_imports[""] >= _SIZES_ARE_INPUT_SINCE:
        inputs.append(writer.constant(np.array(sizes), f"{stem}_sizes"))
    else:
        attributes.append(ir.AttrInt64s("split", list(sizes)))
    split = ir.Node("", "Split", inputs, attributes, outputs=outputs, name=node.name)
    model.graph.insert_before(node, split)
    for reader, place in positions.items():
        result, part = reader.outputs[0], outputs[place]
        part.type, part.shape = result.type, result.shape
        result.replace_all_uses_with(part, replace_graph_outputs=True)
        model.graph.remove(reader, safe=True)
        part.name = result.name
    model.graph.remove(node, safe=True)
