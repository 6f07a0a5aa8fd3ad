"""Rotary embedding written out: `x cos + turned(x) sin`, where `turned` swaps halves, or neighbors, with a sign."""

from __future__ import annotations

import onnx_ir as ir

from onward.graph.fusion.rewriting import Editor, other_input, producer, readers
from onward.graph.nodes.known_values import KnownValues, integer, integers

KIND = "rotary_embedding"


def fuse_rotary(editor: Editor) -> None:
    """Replaces rotations by `RotaryEmbedding` with inputs x [..., D], cosines and sines that broadcast to x."""
    for node in editor.nodes("Concat"):
        found = _halves_turned(editor.facts, node) or _pairs_turned(editor.facts, node)
        if found is not None:
            _fuse(editor, *found)


def _fuse(editor: Editor, x: ir.Value, turned: ir.Value, nodes: list[ir.Node], interleaved: bool) -> None:
    products = readers(turned)
    if len(products) != 1 or products[0].op_type != "Mul" or products[0].domain != "":
        return
    sine = other_input(products[0], turned)
    sums = readers(products[0].outputs[0])
    if sine is None or len(sums) != 1 or sums[0].op_type != "Add" or sums[0].domain != "":
        return
    straight = other_input(sums[0], products[0].outputs[0])
    product = producer(straight, "Mul")
    cosine = None if product is None else other_input(product, x)
    if product is None or cosine is None:
        return
    result = sums[0].outputs[0]
    nodes = [*nodes, product, products[0], sums[0]]
    rank = editor.facts.rank(x)
    if any((editor.facts.rank(table) or 99) > (rank or 0) for table in (cosine, sine)):
        return
    if not editor.are_interior(set(nodes), result):
        return
    output = editor.write(
        "RotaryEmbedding", [x, cosine, sine], sums[0], fused=True, name="rotary", interleaved=int(interleaved)
    )
    about = "neighbors turned" if interleaved else "halves turned"
    editor.replace(result, output, KIND, len(nodes), about)


Turned = tuple[ir.Value, ir.Value, list[ir.Node], bool]
"""x, the turned x, the nodes between them, and whether neighbors were turned."""


def _halves_turned(facts: KnownValues, concat: ir.Node) -> Turned | None:
    """`Concat(-second half, first half)`."""
    negation = producer(concat.inputs[0], "Neg")
    if negation is None or len(concat.inputs) != 2 or not _is_last(facts, concat):
        return None
    second, first = _part(facts, negation.inputs[0]), _part(facts, concat.inputs[1])
    if first is None or second is None or first[0] is not second[0]:
        return None
    x, size = first[0], _features(facts, first[0])
    if size is None or (first[1], second[1]) != ((0, size // 2, 1), (size // 2, size, 1)):
        return None
    return x, concat.outputs[0], _distinct(first[2], second[2], negation, concat), False


def _pairs_turned(facts: KnownValues, concat: ir.Node) -> Turned | None:
    """`Reshape(Concat(Unsqueeze(-odd), Unsqueeze(even)))`."""
    if len(concat.inputs) != 2 or not _is_last(facts, concat):
        return None
    left, right = (producer(value, "Unsqueeze") for value in concat.inputs)
    reshapes = readers(concat.outputs[0])
    if left is None or right is None or len(reshapes) != 1 or reshapes[0].op_type not in ("Reshape", "Flatten"):
        return None
    negation = producer(left.inputs[0], "Neg")
    if negation is None or not (_adds_last_axis(facts, left) and _adds_last_axis(facts, right)):
        return None
    odd, even = _part(facts, negation.inputs[0]), _part(facts, right.inputs[0])
    if odd is None or even is None or odd[0] is not even[0]:
        return None
    x, size = odd[0], _features(facts, odd[0])
    if size is None or (even[1], odd[1]) != ((0, size, 2), (1, size, 2)):
        return None
    turned = reshapes[0].outputs[0]
    shape = facts.shape(turned)
    if shape is None or len(shape) != facts.rank(x) or shape[-1] != size:
        return None
    nodes = _distinct(odd[2], even[2], negation, left, right, concat, reshapes[0])
    return x, turned, nodes, True


def _distinct(*nodes: ir.Node) -> list[ir.Node]:
    return list(dict.fromkeys(nodes))


def _features(facts: KnownValues, value: ir.Value) -> int | None:
    """The even size of a value's last axis."""
    shape = facts.shape(value)
    size = shape[-1] if shape else None
    return size if isinstance(size, int) and size % 2 == 0 else None


def _is_last(facts: KnownValues, node: ir.Node) -> bool:
    axis, rank = integer(node, "axis", -1), facts.rank(node.outputs[0])
    return axis == -1 or (rank is not None and axis == rank - 1)


def _adds_last_axis(facts: KnownValues, node: ir.Node) -> bool:
    axes = integers(node, "axes")
    if axes is None and len(node.inputs) > 1:
        axes = facts.numbers(node.inputs[1])
    rank = facts.rank(node.outputs[0])
    return axes == (-1,) or (rank is not None and axes == (rank - 1,))


def _part(facts: KnownValues, value: ir.Value | None) -> tuple[ir.Value, tuple[int, int, int], ir.Node] | None:
    """x, (start, end, step) and the node of a part of x along its last axis."""
    node = producer(value, "Slice", "Split")
    x = None if node is None else node.inputs[0]
    shape = None if x is None else facts.shape(x)
    if node is None or x is None or shape is None or not isinstance(shape[-1], int):
        return None
    size, rank = shape[-1], len(shape)
    if node.op_type == "Split":
        of_part = None if value is None else facts.shape(value)
        if integer(node, "axis", 0) not in (-1, rank - 1) or len(node.outputs) != 2 or of_part is None:
            return None
        if of_part[-1] != size // 2:
            return None
        return x, ((0, size // 2, 1) if value is node.outputs[0] else (size // 2, size, 1)), node
    bounds = [facts.numbers(given) for given in node.inputs[1:]]
    starts, ends, axes = (integers(node, name) for name in ("starts", "ends", "axes"))
    if starts is None and len(bounds) >= 3:
        starts, ends, axes = bounds[:3]
    steps = bounds[3] if len(bounds) > 3 else (1,)
    if starts is None or ends is None or axes is None or steps is None or len(starts) != 1:
        return None
    if axes[0] not in (-1, rank - 1):
        return None
    start, end, step = slice(starts[0], ends[0], steps[0]).indices(size)
    return x, (start, end, step), node
