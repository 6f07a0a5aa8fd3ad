"""Bags of embeddings: the loop over bags that torch's exporter writes for `nn.EmbeddingBag` becomes one node.

What a turn of the loop computes is read as an expression, in which names of values, copies, casts and branches that are
never taken do not count, and compared with what the exporter writes for sums, means and maxima.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onward.graph.fusion.rewriting import Editor, producer, readers
from onward.graph.nodes.known_values import KnownValues, integer, integers
from onward.graph.nodes.node_writer import original

KIND = "embedding_bag"

_TURN, _ROWS, _ZEROS = "turn", "rows", "zeros"
_NEXT = ("Add", _TURN, 1)

LookUp = tuple[ir.Value, ir.Value, ir.Value | None]
"""The table, the indices, and the factors of the rows that are looked up, None where these are 1."""


def fuse_embedding_bag(editor: Editor) -> None:
    """Replaces a `Loop` that appends the row of a bag to a sequence each turn, with what reads the sequence."""
    for node in editor.nodes("Loop"):
        joined = _joined(node)
        read = None if joined is None else _read_loop(editor.facts, node)
        if joined is None or read is None:
            continue
        mode, looked_up, bounds = read
        result = _result(joined, looked_up[0])
        last = None if result is None else result.producer()
        if result is not None and last is not None and editor.are_interior({node, joined, last}, result):
            _write(editor, node, result, mode, looked_up, bounds)


def _joined(node: ir.Node) -> ir.Node | None:
    """The `ConcatFromSequence` that alone reads what a loop of two carried values, a sequence and a number, gives."""
    if len(node.inputs) != 4 or node.inputs[0] is not None or len(node.outputs) != 2:
        return None
    place = _place_of_sequence(node)
    found = readers(node.outputs[place])
    is_joined = len(found) == 1 and found[0].op_type == "ConcatFromSequence" and not node.outputs[1 - place].uses()
    if not is_joined or integer(found[0], "axis", 1) or integer(found[0], "new_axis", 0):
        return None
    return found[0] if producer(node.inputs[2 + place], "SequenceEmpty") is not None else None


def _place_of_sequence(node: ir.Node) -> int:
    """Which of the two carried values is the sequence: the exporter writes them in any order."""
    return 0 if producer(node.inputs[2], "SequenceEmpty") is not None else 1


def _result(joined: ir.Node, weight: ir.Value) -> ir.Value | None:
    """The rows of all bags in the type of the weights, into which they may be cast."""
    found = joined.outputs[0]
    casts = [node for node in readers(found) if node.op_type in ("Cast", "CastLike")]
    if len(casts) == len(readers(found)) == 1 and not found.is_graph_output():
        found = casts[0].outputs[0]
        like = casts[0].inputs[1] if casts[0].op_type == "CastLike" else None
        to = weight.dtype if like is weight else ir.DataType(integer(casts[0], "to", 0))
        return found if to is weight.dtype else None
    return found if weight.dtype is ir.DataType.FLOAT else None


def _read_loop(facts: KnownValues, node: ir.Node) -> tuple[str, LookUp, ir.Value] | None:
    """The kind of bags, the rows that are put into them, and the bounds between them; None for another loop."""
    body = node.attributes["body"].as_graph()
    place = _place_of_sequence(node)
    turn = _Turn(facts, body, place)
    if turn.of(node.inputs[3 - place]) != 0:
        return None
    going, appended, following = (turn.of(body.outputs[i]) for i in (0, 1 + place, 2 - place))
    match going, appended, following:
        case ("Less", ("Add", "turn", 1), count), ("SequenceInsert", "rows", row), ("Add", "turn", 1):
            pass
        case _:
            return None
    match row:
        case ("If", ("Equal", ("Slice", bounds, *_), _), _, kept):
            start, end = ("Slice", bounds, _TURN, _NEXT), ("Slice", bounds, _NEXT, ("Add", _TURN, 2))
        case _:
            return None
    mode, rows, total = _kind(kept)
    part, is_last = (
        ("Slice", rows, start, end),
        ("Equal", _TURN, count - 1 if isinstance(count, int) else ("Sub", count, 1)),
    )
    added, size = ("ReduceSum", part, (0,), 1), ("Sub", total, start)
    mean = ("If", ("Greater", size, 0), ("Div", added, size), added)
    expected = {
        "sum": added,
        "mean": ("If", is_last, mean, ("ReduceMean", part, (0,), 1)),
        "max": ("ReduceMax", ("If", is_last, ("Slice", rows, start, total), part), (0,), 1),
    }
    if row != ("If", ("Equal", start, end), _ZEROS, expected.get(mode)):
        return None
    outside = [rows, *(_parts(bounds) or [bounds])] if isinstance(bounds, ir.Value) else [None]
    are_outside = all(isinstance(value, ir.Value) and value.graph is node.graph for value in outside)
    looked_up = _read_rows(facts, rows) if are_outside and _ends_at_bounds(facts, bounds, count) else None
    if looked_up is None or (mode != "sum" and (looked_up[2] is not None or not _counts(facts, looked_up[1], total))):
        return None
    return mode, looked_up, bounds


def _kind(kept: Any) -> tuple[str, Any, Any]:
    """The kind of bags by the operator at the end, the rows, and how many there are; "" where it is none."""
    match kept:
        case ("ReduceSum", ("Slice", rows, *_), *_):
            return "sum", rows, None
        case ("If", _, ("If", ("Greater", ("Sub", total, _), _), *_), ("ReduceMean", ("Slice", rows, *_), *_)):
            return "mean", rows, total
        case ("ReduceMax", ("If", _, ("Slice", rows, _, total), _), *_):
            return "max", rows, total
    return "", None, None


class _Turn:
    """What values of a loop's body are: numbers, values from outside of it, or operators with their operands."""

    def __init__(self, facts: KnownValues, body: ir.Graph, place: int) -> None:
        self._facts = facts
        self._known: dict[ir.Value, Any] = {body.inputs[2 + place]: _ROWS, body.inputs[3 - place]: _TURN}

    def of(self, value: ir.Value | None) -> Any:
        """The expression of a value."""
        if value is None:
            return None
        if value not in self._known:
            self._known[value] = self._read(value)
        return self._known[value]

    def _read(self, value: ir.Value) -> Any:
        constant = _constant(self._facts, value)
        if constant is not None and constant.size == 1 and constant.dtype.kind in "iub":
            return int(constant.reshape(())[()])
        if constant is not None and not constant.any():
            return _ZEROS
        node = value.producer()
        if node is None or node.domain != "" or node.op_type in ("Gather", "Mul", "Concat"):
            return value
        first = self.of(node.inputs[0])
        if node.op_type in ("Identity", "Cast", "CastLike") or (node.op_type == "Reshape" and first is _TURN):
            return first
        if node.op_type == "If":
            return self._branch(node, first, node.outputs.index(value))
        if node.op_type == "Shape":
            return "Shape", _unshaped(node.inputs[0])
        if node.op_type == "Expand":
            return _ZEROS if first is _ZEROS else value
        if node.op_type.startswith("Reduce"):
            axes = integers(node, "axes") or (self._facts.numbers(node.inputs[1]) if len(node.inputs) > 1 else None)
            return node.op_type, first, axes, integer(node, "keepdims", 1)
        found = (node.op_type, first, *(self.of(given) for given in node.inputs[1:]))
        match found:
            case ("Equal", int() as left, int() as right):
                return int(left == right)
        return value if node.op_type in ("Range", "Reshape") else found

    def _branch(self, node: ir.Node, condition: Any, place: int) -> Any:
        then, otherwise = (node.attributes[name].as_graph().outputs[place] for name in ("then_branch", "else_branch"))
        if isinstance(condition, int):
            return self.of(then if condition else otherwise)
        return "If", condition, self.of(then), self.of(otherwise)


def _constant(facts: KnownValues, value: ir.Value) -> np.ndarray | None:
    """A small stored tensor that does not train, or the numbers that a value always has."""
    tensor = value.const_value
    if tensor is None or value.name in facts.weights or tensor.size > _WIDEST:
        found = facts.evaluate(value)
        return None if found is None or found.dtype == object else found
    return np.asarray(tensor.numpy())


_WIDEST = 2**14
"""Columns that a table may have; the exporter stores the row of an empty bag."""


def _unshaped(value: ir.Value | None) -> ir.Value | None:
    """The value whose elements, in their order, a value has."""
    while (node := producer(value, "Reshape", "Identity")) is not None:
        value = node.inputs[0]
    return value


def _counts(facts: KnownValues, indices: ir.Value, total: Any) -> bool:
    """Whether something is the number of the indices."""
    if isinstance(total, int):
        return facts.shape(indices) == (total,)
    return bool(total == ("Shape", _unshaped(indices)))


def _ends_at_bounds(facts: KnownValues, bounds: ir.Value, count: Any) -> bool:
    """Whether there are as many bags as bounds, but for the end of the last bag."""
    joined = producer(bounds, "Concat")
    if joined is not None and count == ("Size", joined.inputs[0]):
        return len(joined.inputs) == 2
    return count == ("Sub", ("Size", bounds), 1) or (isinstance(count, int) and facts.shape(bounds) == (count + 1,))


def _read_rows(facts: KnownValues, rows: ir.Value) -> LookUp | None:
    """What rows are looked up in, and by what; None for other rows."""
    product, factors = producer(rows, "Mul"), None
    if product is not None:
        spread = producer(product.inputs[1], "Unsqueeze")
        factors = product.inputs[1] if spread is None else spread.inputs[0]
        if factors is None or (spread is None and not _is_one(facts, factors)):
            return None
        rows, factors = product.inputs[0], None if _is_one(facts, factors) else factors  # type: ignore[assignment]
    lookup = producer(original(rows), "Gather")
    if lookup is None or integer(lookup, "axis", 0):
        return None
    weight, indices = lookup.inputs
    if weight is None or indices is None or facts.rank(weight) != 2 or facts.rank(indices) not in (1, None):
        return None
    return weight, indices, factors


def _is_one(facts: KnownValues, value: ir.Value) -> bool:
    """Whether all elements are 1: factors that nobody gave."""
    while (node := producer(value, "Expand", "Identity", "Cast", "CastLike")) is not None and node.inputs[
        0
    ] is not None:
        value = node.inputs[0]
    found = _constant(facts, value)
    return found is not None and bool((found == 1).all())


def _rows_are_bags(facts: KnownValues, indices: ir.Value, bounds: ir.Value) -> ir.Value | None:
    """A matrix whose rows are the bags; None where bags are others."""
    matrix = _unshaped(indices)
    shape = None if matrix is None else facts.shape(matrix)
    if matrix is None or shape is None or len(shape) != 2:
        return None
    count, width = shape
    if not isinstance(width, int):
        return None
    known = _constant(facts, bounds)
    if known is not None:
        return (
            matrix if isinstance(count, int) and known.tolist() == [width * row for row in range(count + 1)] else None
        )
    joined = producer(bounds, "Concat")
    starts = None if joined is None else producer(original(joined.inputs[0]), "Range")
    if starts is None or not facts.is_number(starts.inputs[0], 0) or not facts.is_number(starts.inputs[2], width):
        return None
    product = producer(original(starts.inputs[1]), "Mul")
    if product is None:
        return matrix if isinstance(count, int) and facts.is_number(starts.inputs[1], count * width) else None
    rows = next((given for given in product.inputs if given is not None and not facts.is_number(given, width)), None)
    return matrix if rows is not None and facts.sizes(rows) == (count,) else None


def _write(editor: Editor, loop: ir.Node, result: ir.Value, mode: str, given: LookUp, bounds: ir.Value) -> None:
    weight, indices, factors = given
    matrix = _rows_are_bags(editor.facts, indices, bounds) if factors is None else None
    joined = result.producer()
    assert joined is not None
    if matrix is None and bounds.graph is not editor.graph:  # of a branch that is always taken
        bounds = editor.write("Concat", _parts(bounds), joined, name=KIND, axis=0)
    inputs = [weight, indices, bounds, factors] if matrix is None else [weight, matrix]
    output = editor.write("EmbeddingBag", inputs, joined, fused=True, name=KIND, mode=mode)
    count = sum(1 for _ in ir.traversal.RecursiveGraphIterator(loop.attributes["body"].as_graph()))
    editor.replace(result, output, KIND, count + 2, mode)


def _parts(bounds: ir.Value) -> list[ir.Value]:
    """What bounds are concatenated of; nothing where they are not."""
    joined = producer(bounds, "Concat")
    return [] if joined is None else [value for value in map(original, joined.inputs) if value is not None]
