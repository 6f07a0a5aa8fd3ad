"""Finding attention that is written out: from a softmax back to the product of queries and keys, and on to the values.

Exporters differ in where they put the scale (on the queries, the keys, both by its square root, or the scores), in how
they mask (adding, or choosing by a condition), and in what is between softmax and values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import onnx_ir as ir

from onward.graph.fusion.einsum import read_probability_product, read_score_product
from onward.graph.fusion.rewriting import Editor, producer, readers
from onward.graph.nodes.known_values import integer, integers

HIDDEN = -9000.0
"""A score replaced by this or less has weight 0 in the softmax: `exp` of it is 0 in every float type."""

_WIDE = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
_MOST_STEPS = 12

Factor = tuple[str, ir.Value]
"""(Mul or Div, the other operand)."""


@dataclass(frozen=True, kw_only=True)
class Mask:
    """One thing that changes scores: a float that is added, or a condition on keeping them.

    Attributes:
        value: float, or bool.
        fill: what takes the place of a score that is not kept, as a value of the graph; None: `value` is added.
        hidden_if: the condition's value for scores that are not kept.
        outer: factors that are applied after the mask.
        merged: the mask belongs to scores whose first two axes are still one.
    """

    value: ir.Value
    fill: ir.Value | None = None
    hidden_if: bool = False
    outer: tuple[Factor, ...] = ()
    merged: bool = False


@dataclass(frozen=True)
class Operand:
    """Queries, keys or values: a value of the graph and the order of its axes that makes it [batch.., tokens, size]."""

    value: ir.Value
    order: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What is before a softmax.

    Attributes:
        query, key: the operands of the product.
        number: the known part of the scale.
        factors: the parts of it that are not known before running.
        masks: from the softmax inwards.
        groups: the shape into which scores [N, L, S] are brought to become [B, H, L, S]; None: they are that already.
        nodes: everything between the operands and the softmax.
    """

    query: Operand
    key: Operand
    number: float = 1.0
    factors: tuple[Factor, ...] = ()
    masks: tuple[Mask, ...] = ()
    groups: ir.Value | None = None
    nodes: tuple[ir.Node, ...] = ()


@dataclass(kw_only=True)
class Written:
    """Attention as it was found.

    Attributes:
        scores: what the softmax is taken of.
        value: the operand of the second product.
        result: what that product gives, and the order of axes that brings [batch.., L, E] into its form.
        guarded: probabilities that are NaN (no key to look at) are replaced by 0.
        dropout: ratio of the dropout on the probabilities.
        is_merged: the second product works on scores whose first two axes are one again.
        nodes: everything that fusion replaces.
    """

    scores: Scores
    value: Operand
    result: ir.Value
    result_order: tuple[int, ...] | None = None
    guarded: bool = False
    dropout: float = 0.0
    is_merged: bool = False
    nodes: list[ir.Node] = field(default_factory=list)


def find_attention(editor: Editor, softmax: ir.Node) -> Written | None:
    """The attention around a softmax, if there is one of which nothing inside is read elsewhere."""
    source = softmax.inputs[0]
    rank = None if source is None else editor.facts.rank(source)
    default = -1 if editor.facts.opset >= 13 else 1
    if source is None or rank not in (3, 4) or integer(softmax, "axis", default) not in (-1, rank - 1):
        return None
    scores = _trace(editor, source, _MOST_STEPS)
    if scores is None:
        return None
    found = _follow(
        editor,
        softmax,
        Written(scores=scores, value=scores.query, result=softmax.outputs[0], nodes=[*scores.nodes, softmax]),
    )
    if found is None or found.is_merged != (scores.groups is not None):
        return None
    if not editor.are_interior(set(found.nodes), found.result):
        return None
    return found


def _trace(editor: Editor, value: ir.Value, steps: int) -> Scores | None:
    """Goes back from a value to the product of queries and keys, one node at a time."""
    node = producer(value, "MatMul", "Einsum", "Mul", "Div", "Add", "Sub", "Where", "Cast", "Reshape")
    if node is None or not steps:
        return None
    if node.op_type == "MatMul":
        return _read_product(editor, node)
    if node.op_type == "Einsum":
        operands = read_score_product(node)
        return (
            None if operands is None else Scores(query=Operand(*operands[0]), key=Operand(*operands[1]), nodes=(node,))
        )
    if node.op_type in ("Mul", "Div"):
        return _trace_factor(editor, node, steps)
    if node.op_type in ("Add", "Sub"):
        return _trace_addition(editor, node, steps)
    if node.op_type == "Where":
        return _trace_choice(editor, node, steps)
    source = node.inputs[0]
    if source is None:
        return None
    if node.op_type == "Cast" and ir.DataType(integer(node, "to", 0)) not in _WIDE:
        return None
    inner = _trace(editor, source, steps - 1)
    if inner is None:
        return None
    if node.op_type == "Reshape":
        return _regroup(editor, node, inner)
    return replace(inner, nodes=(*inner.nodes, node))


def _read_product(editor: Editor, node: ir.Node) -> Scores | None:
    """`MatMul(queries, keys transposed)`, with known factors of either operand taken out."""
    query, key = node.inputs
    if query is None or key is None:
        return None
    rank = editor.facts.rank(query)
    if rank not in (3, 4) or editor.facts.rank(key) != rank:
        return None
    query, first = _without_factor(editor, query)
    key, second = _without_factor(editor, key)
    swapped = (*range(rank - 2), rank - 1, rank - 2)
    transpose = producer(key, "Transpose")
    order = None if transpose is None else integers(transpose, "perm")
    if transpose is not None and transpose.inputs[0] is not None and order is not None:
        order = tuple(order[axis] for axis in swapped)
        operand = Operand(transpose.inputs[0], None if order == tuple(range(rank)) else order)
    else:
        operand = Operand(key, swapped)
        flat = _transposed_when_flat(editor, key)
        operand = operand if flat is None else Operand(flat)
    return Scores(query=Operand(query), key=operand, number=first * second, nodes=(node,))


def _transposed_when_flat(editor: Editor, value: ir.Value) -> ir.Value | None:
    """torch's newer exporter transposes the last two axes of four as the last two of three."""
    outer = producer(value, "Reshape")
    transpose = producer(outer.inputs[0], "Transpose") if outer is not None else None
    inner = producer(transpose.inputs[0], "Reshape") if transpose is not None else None
    if outer is None or transpose is None or inner is None or integers(transpose, "perm") != (0, 2, 1):
        return None
    source, target = inner.inputs[0], outer.inputs[1]
    shape = None if source is None else editor.facts.shape(source)
    sizes = None if target is None else editor.facts.sizes(target)
    if shape is None or sizes is None or None in shape or len(shape) < 3:
        return None
    flat = None if inner.inputs[1] is None else editor.facts.sizes(inner.inputs[1])
    if flat is None or len(flat) != 3 or flat[1:] != shape[-2:]:
        return None
    return source if sizes == (*shape[:-2], shape[-1], shape[-2]) else None


def _without_factor(editor: Editor, value: ir.Value) -> tuple[ir.Value, float]:
    """A value without a product with a known number around it, and that number."""
    node = producer(value, "Mul", "Div")
    if node is None:
        return value, 1.0
    left, right = node.inputs
    number = editor.facts.number(right)
    if left is not None and number:
        return left, number if node.op_type == "Mul" else 1.0 / number
    number = editor.facts.number(left)
    if right is not None and number is not None and node.op_type == "Mul":
        return right, number
    return value, 1.0


def _trace_factor(editor: Editor, node: ir.Node, steps: int) -> Scores | None:
    """Scores times or by something."""
    for source, factor in _pairs(node):
        if node.op_type == "Div" and source is node.inputs[1]:
            continue
        number = editor.facts.number(factor)
        if number is None and not _is_per_head(editor, factor):
            continue
        inner = _trace(editor, source, steps - 1)
        if inner is None:
            continue
        pair = (node.op_type, factor)
        masks = tuple(replace(mask, outer=(*mask.outer, pair)) for mask in inner.masks)
        nodes = (*inner.nodes, node)
        if number:
            number = number if node.op_type == "Mul" else 1.0 / number
            return replace(inner, number=inner.number * number, masks=masks, nodes=nodes)
        return None if inner.groups else replace(inner, factors=(*inner.factors, pair), masks=masks, nodes=nodes)
    return None


def _is_per_head(editor: Editor, value: ir.Value) -> bool:
    """Whether a factor is the same for all queries and keys of a head, so that queries can be multiplied by it."""
    shape = editor.facts.shape(value)
    return shape is not None and len(shape) <= 4 and all(size == 1 for size in shape[-2:])


def _pairs(node: ir.Node) -> list[tuple[ir.Value, ir.Value]]:
    """Both ways to see one operand of a binary operator as the scores and the other as what changes them."""
    if len(node.inputs) != 2 or node.inputs[0] is None or node.inputs[1] is None or node.inputs[0] is node.inputs[1]:
        return []
    left, right = node.inputs[0], node.inputs[1]
    return [(left, right), (right, left)]


def _trace_addition(editor: Editor, node: ir.Node, steps: int) -> Scores | None:
    """Scores plus something; `Where(condition, 0, -inf)` is a condition."""
    for source, added in _pairs(node):
        if node.op_type == "Sub":
            return None
        inner = _trace(editor, source, steps - 1)
        if inner is None:
            continue
        if not _fits(editor, added, source):
            return None
        mask = _infinite_choice(editor, added) or Mask(value=added)
        return _masked(inner, mask, node)
    return None


def _masked(inner: Scores, mask: Mask, node: ir.Node) -> Scores:
    mask = replace(mask, merged=inner.groups is None)
    return replace(inner, masks=(mask, *inner.masks), nodes=(*inner.nodes, node))


def _fits(editor: Editor, mask: ir.Value, scores: ir.Value) -> bool:
    """Whether a mask broadcasts to the scores, and not the scores to it, as far as sizes are known."""
    shape, of_scores = editor.facts.shape(mask), editor.facts.shape(scores)
    if shape is None or of_scores is None or len(shape) > len(of_scores):
        return False
    pairs = zip(reversed(shape), reversed(of_scores), strict=False)
    return all(left == 1 or right != 1 for left, right in pairs)


def _infinite_choice(editor: Editor, value: ir.Value) -> Mask | None:
    """`Where(condition, 0, -inf)`, or the other way round, added to scores: it keeps them or hides them."""
    node = producer(value, "Where")
    if node is None or any(source is None for source in node.inputs):
        return None
    condition, chosen, otherwise = node.inputs
    for kept, fill, hidden_if in ((chosen, otherwise, False), (otherwise, chosen, True)):
        if editor.facts.number(kept) == 0.0 and editor.facts.number(fill) == float("-inf"):
            assert condition is not None
            return Mask(value=condition, fill=fill, hidden_if=hidden_if)
    return None


def _trace_choice(editor: Editor, node: ir.Node, steps: int) -> Scores | None:
    """Scores where a condition holds, a very low number elsewhere."""
    condition, chosen, otherwise = node.inputs
    if condition is None or chosen is None or otherwise is None:
        return None
    for source, fill, hidden_if in ((chosen, otherwise, False), (otherwise, chosen, True)):
        number = editor.facts.number(fill)
        if number is None or number > HIDDEN:
            continue
        inner = _trace(editor, source, steps - 1)
        if inner is None or not _fits(editor, condition, source):
            continue
        return _masked(inner, Mask(value=condition, fill=fill, hidden_if=hidden_if), node)
    return None


def _regroup(editor: Editor, node: ir.Node, inner: Scores) -> Scores | None:
    """Scores [N, L, S] as [B, H, L, S]; the last two axes stay what they are."""
    source, target = node.inputs[0], node.inputs[1]
    if inner.groups is not None or source is None or target is None or editor.facts.opset < 13:
        return None
    before, sizes = editor.facts.shape(source), editor.facts.sizes(target)
    if before is None or sizes is None or len(before) != 3 or len(sizes) != 4:
        return None
    if (integer(node, "allowzero", 0) == 0 and 0 in sizes) or not _same_ending(before, sizes):
        return None
    return replace(inner, groups=target, nodes=(*inner.nodes, node))


def _same_ending(before: tuple[int | str | None, ...], sizes: tuple[int | str, ...]) -> bool:
    """Whether a reshape keeps the last two axes; a -1 stands for the one that is left."""
    pairs = list(zip(before[-2:], sizes[-2:], strict=True))
    return all(left == right or right == -1 for left, right in pairs) and any(left == right for left, right in pairs)


def _follow(editor: Editor, softmax: ir.Node, found: Written) -> Written | None:
    """Goes on from the softmax to the product with the values."""
    value = softmax.outputs[0]
    for _ in range(_MOST_STEPS):
        nodes = readers(value)
        guard = _nan_guard(editor, value, nodes)
        if guard is not None:
            found.guarded = True
            found.nodes += nodes
            value = guard.outputs[0]
            continue
        if len(nodes) != 1 or nodes[0].domain != "" or nodes[0].inputs[0] is not value:
            return None
        node = nodes[0]
        found.nodes.append(node)
        found.result = node.outputs[0]
        if node.op_type == "MatMul" and node.inputs[1] is not None and node.inputs[1] is not value:
            found.value = Operand(node.inputs[1])
            return found if editor.facts.rank(node.inputs[1]) == editor.facts.rank(value) else None
        if node.op_type == "Einsum":
            read = read_probability_product(node)
            if read is None:
                return None
            found.value, found.result_order = Operand(*read[0]), read[1]
            return found
        if not _is_passed_through(editor, node, value, found):
            return None
        value = node.outputs[0]
    return None


def _is_passed_through(editor: Editor, node: ir.Node, value: ir.Value, found: Written) -> bool:
    """Whether a node between softmax and values is one that fused attention has a place for."""
    if node.op_type == "Cast":
        return True
    if node.op_type == "Dropout" and not found.dropout and not any(v.uses() for v in node.outputs[1:]):
        if len(node.inputs) > 2 and node.inputs[2] is not None and not node.inputs[2].is_initializer():
            return False  # an input of the graph says whether it is active
        ratio = editor.facts.number(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else 0.5
        if "ratio" in node.attributes:
            ratio = node.attributes["ratio"].as_float()
        found.dropout = -1.0 if ratio is None else ratio
        return 0.0 <= found.dropout < 1.0 and editor.facts.opset >= 7
    if node.op_type != "Reshape" or found.is_merged or node.inputs[1] is None:
        return False
    before, sizes = editor.facts.shape(value), editor.facts.sizes(node.inputs[1])
    found.is_merged = True
    return (
        before is not None
        and sizes is not None
        and len(before) == 4
        and len(sizes) == 3
        and 0 not in sizes
        and (_same_ending(before, sizes))
    )


def _nan_guard(editor: Editor, value: ir.Value, nodes: list[ir.Node]) -> ir.Node | None:
    """`Where(IsNaN(p), 0, p)`: torch's newer exporter gives queries without a key the result 0."""
    check = next((node for node in nodes if node.op_type == "IsNaN"), None)
    if check is None or len(nodes) != 2:
        return None
    choice = nodes[0] if nodes[1] is check else nodes[1]
    if choice.op_type != "Where" or choice.inputs[0] is not check.outputs[0] or choice.inputs[2] is not value:
        return None
    return choice if editor.facts.number(choice.inputs[1]) == 0.0 else None
