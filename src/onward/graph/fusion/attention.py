"""Attention written out becomes one node `Attention` of the domain `onward.fused`, which torch computes in one call.

The node has inputs Q [B, H, L, D], K [B, G, S, D], V [B, G, S, E] with H a multiple of G, optionally a mask that
broadcasts to [B, H, L, S] (bool: True may be looked at; float: added), and optionally which queries have a key at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import onnx_ir as ir

from onward.graph.fusion.attention_pattern import HIDDEN, Mask, Operand, Scores, Written, find_attention
from onward.graph.fusion.rewriting import Editor, producer
from onward.graph.nodes.known_values import KnownValues, Size, all_finite, integer

KIND = "attention"
UNIFORM, ZERO, NAN = "uniform", "zero", "nan"
"""What a query without any key gives: the mean of the values, zeros, or NaN."""

_LARGEST_SEARCHED = 400


def fuse_attention(editor: Editor) -> None:
    """Replaces attention that is written out, wherever a softmax is in the middle of it."""
    writer = _MaskWriter(editor)
    for softmax in editor.nodes("Softmax"):
        found = find_attention(editor, softmax)
        if found is not None:
            _write(editor, writer, found)
    for node in editor.nodes("Attention"):
        _replace_standard(editor, writer, node)


class _MaskWriter:
    """Writes masks in the form that the fused node takes; layers with the same mask share it."""

    def __init__(self, editor: Editor) -> None:
        self.editor = editor
        self._written: dict[object, ir.Value] = {}

    def write(self, op_type: str, *inputs: ir.Value, before: ir.Node, fused: bool = False) -> ir.Value:
        """The value of an operator of these inputs, written once for all that ask for it."""
        key = (op_type, fused, *(self.editor.facts.signature(value) for value in inputs))
        if key not in self._written:
            self._written[key] = self.editor.write(op_type, inputs, before, fused=fused, name=f"mask/{op_type}")
        return self._written[key]

    def condition(self, mask: Mask, before: ir.Node) -> ir.Value:
        """The condition of a mask, true where a score is kept."""
        return self.write("Not", mask.value, before=before) if mask.hidden_if else mask.value

    def combined(self, masks: Sequence[Mask], before: ir.Node) -> ir.Value:
        """What masks do to scores of 0, one after the other from the last to the first; one of them is added."""
        total: ir.Value | None = None
        hiding: list[Mask] = []
        for mask in reversed(masks):
            if mask.fill is None:
                term = mask.value
                for op_type, factor in mask.outer:
                    term = self.write(op_type, term, factor, before=before)
                total = term if total is None else self.write("Add", total, term, before=before)
                for early in hiding:
                    assert early.fill is not None
                    lowered = self.write("Add", term, early.fill, before=before)
                    total = self.write("Where", self.condition(early, before), total, lowered, before=before)
                hiding = []
            elif total is None:
                hiding.append(mask)
            else:
                total = self.write("Where", self.condition(mask, before), total, mask.fill, before=before)
        assert total is not None
        return total


def _write(editor: Editor, masks: _MaskWriter, found: Written) -> None:
    scores, final = found.scores, found.nodes[-1]
    if not _fills_hide(editor.facts, found):
        return
    types = [editor.facts.dtype(operand.value) for operand in (scores.query, scores.key, found.value)]
    if len({dtype for dtype in types if dtype is not None}) > 1:
        return
    grouped = _without_repeats(editor, scores.key, found.value)
    key, value = grouped or (scores.key, found.value)
    query = _ordered(editor, scores.query, final)
    for op_type, factor in scores.factors:
        query = editor.write(op_type, [query, factor], final, name="attention/scaled_query")
    operands = [query, _ordered(editor, key, final), _ordered(editor, value, final)]
    result_rank = editor.facts.rank(found.result)
    merged = result_rank == 3 or (result_rank is None and found.is_merged)
    if scores.groups is not None:
        operands = [_ungrouped(editor, operand, scores.groups, final) for operand in operands]
    elif editor.facts.rank(scores.query.value) == 3:
        merged = True
        operands = [_unsqueeze(editor, operand, final) for operand in operands]
    found.scores = _with_masks_of_rank_4(editor, found, final)
    mask, seen, empty = _write_mask(editor, masks, found, final)
    output = editor.write(
        "Attention",
        [*operands, mask, seen],
        final,
        fused=True,
        name="attention",
        scale=scores.number,
        dropout_ratio=found.dropout,
        empty_rows=empty,
    )
    _describe_output(editor, output, found, merged)
    if scores.groups is not None:
        output = _merged(editor, output, final)
    elif merged:
        axes = editor.integers([0])
        output = (
            editor.write("Squeeze", [output, axes], final)
            if editor.facts.opset >= 13
            else editor.write("Squeeze", [output], final, axes=[0])
        )
    if found.result_order is not None:
        output = editor.write("Transpose", [output], final, perm=list(found.result_order))
    editor.replace(found.result, output, KIND, len(found.nodes), _about(found, grouped is not None))


def _about(found: Written, grouped: bool) -> str:
    masks = found.scores.masks
    added = sum(mask.fill is None for mask in masks)
    parts = []
    if added:
        parts.append("a mask that is added")
    if added < len(masks):
        parts.append("a mask that hides keys")
    if grouped:
        parts.append("grouped heads")
    if found.dropout:
        parts.append(f"dropout {found.dropout:g}")
    return ", ".join(parts) or "no mask"


def _describe_output(editor: Editor, output: ir.Value, found: Written, merged: bool) -> None:
    """Notes type and shape of the fused node's output, where it is not the value that is replaced."""
    editor.facts.describe(found.result)
    output.type = found.result.type
    if not merged and found.result_order is None:
        output.shape = found.result.shape


def _fills_hide(facts: KnownValues, found: Written) -> bool:
    """Whether what takes the place of hidden scores is low enough, also after the factors that come later."""
    kinds = set()
    for mask in found.scores.masks:
        if mask.fill is None:
            continue
        fill = facts.number(mask.fill)
        if fill is None:
            return False
        for op_type, factor in mask.outer:
            number = facts.number(factor)
            if number is None or number <= 0:
                return False
            fill = fill * number if op_type == "Mul" else fill / number
        if fill > HIDDEN:
            return False
        kinds.add(math.isinf(fill))
    return len(kinds) < 2


def _ordered(editor: Editor, operand: Operand, before: ir.Node) -> ir.Value:
    """An operand with its axes in order."""
    if operand.order is None:
        return operand.value
    return editor.write("Transpose", [operand.value], before, name="attention/order", perm=list(operand.order))


def _unsqueeze(editor: Editor, value: ir.Value, before: ir.Node) -> ir.Value:
    """[N, L, D] -> [1, N, L, D]."""
    if editor.facts.opset < 13:
        return editor.write("Unsqueeze", [value], before, axes=[0])
    return editor.write("Unsqueeze", [value, editor.integers([0])], before)


def _ungrouped(editor: Editor, value: ir.Value, groups: ir.Value, before: ir.Node) -> ir.Value:
    """[N, L, D] -> [B, H, L, D], where N = B H; `groups` begins with B and H."""
    shape, sizes = editor.facts.shape(value), editor.facts.sizes(groups)
    node = producer(value, "Reshape")
    source = None if node is None else node.inputs[0]
    known = None if source is None else editor.facts.shape(source)
    if source is not None and known is not None and len(known) == 4 and shape is not None and sizes is not None:
        alike = None not in known and known[2:] == shape[1:] and known[1] == sizes[1]
        if alike and sizes[0] in (-1, known[0]):
            return source
    lead = editor.write("Slice", [groups, editor.integers([0]), editor.integers([2])], before)
    return editor.write("Reshape", [value, _joined(editor, lead, value, before)], before)


def _joined(editor: Editor, lead: ir.Value, value: ir.Value, before: ir.Node) -> ir.Value:
    """The sizes in `lead`, then the last two of a value."""
    full = editor.write("Shape", [value], before)
    ends = [editor.integers([-2]), editor.integers([2**63 - 1])]
    tail = editor.write("Slice", [full, *ends], before)
    return editor.write("Concat", [lead, tail], before, axis=0)


def _merged(editor: Editor, value: ir.Value, before: ir.Node) -> ir.Value:
    """[B, H, L, E] -> [B H, L, E]."""
    return editor.write("Reshape", [value, _joined(editor, editor.integers([-1]), value, before)], before)


def _with_masks_of_rank_4(editor: Editor, found: Written, before: ir.Node) -> Scores:
    """Masks of scores [N, L, S] in the form that scores [B, H, L, S] take; those that are the same for all N stay."""
    scores = found.scores
    masks = []
    for mask in scores.masks:
        shape = editor.facts.shape(mask.value)
        three = shape is not None and len(shape) == 3 and mask.merged
        if three and scores.groups is not None and shape is not None and shape[0] != 1:
            mask = replace(mask, value=_ungrouped(editor, mask.value, scores.groups, before))
        elif three and scores.groups is None and editor.facts.rank(scores.query.value) == 3:
            mask = replace(mask, value=_unsqueeze(editor, mask.value, before))
        masks.append(mask)
    return replace(scores, masks=tuple(masks))


def _write_mask(
    editor: Editor, writer: _MaskWriter, found: Written, before: ir.Node
) -> tuple[ir.Value | None, ir.Value | None, str]:
    """The mask, which queries have a key, and what the others give.

    A condition that replaces scores by a finite number gives a query without keys the mean of all values; one that
    replaces them by minus infinity gives NaN, or 0 where the model guards against that. A float that is added keeps
    its meaning by itself, unless minus infinity can be in it.
    """
    facts = editor.facts
    added = [mask for mask in found.scores.masks if mask.fill is None]
    keeping = [mask for mask in found.scores.masks if mask.fill is not None]
    broken = ZERO if found.guarded else NAN
    if not keeping:
        if not added:
            return None, None, ZERO
        mask = writer.combined(added, before)
        if not any(_may_be_infinite(facts, one.value) for one in added):
            return mask, None, ZERO
        return _opened(writer, mask, before, broken)
    conditions = [writer.condition(mask, before) for mask in keeping]
    kept = reduce(lambda left, right: writer.write("And", left, right, before=before), conditions)
    fill = keeping[0].fill
    assert fill is not None
    infinite = math.isinf(facts.number(fill) or 0.0)
    if not added:
        return _opened(writer, kept, before, broken if infinite else UNIFORM)
    mask = writer.combined(found.scores.masks, before)
    if infinite:
        return _opened(writer, mask, before, broken)
    return mask, writer.write("VisibleRows", kept, before=before, fused=True), UNIFORM


def _opened(
    writer: _MaskWriter, mask: ir.Value, before: ir.Node, empty: str
) -> tuple[ir.Value | None, ir.Value | None, str]:
    """A mask without empty rows, for kernels differ in what they make of one; and which rows were not empty."""
    opened = writer.write("OpenedMask", mask, before=before, fused=True)
    return opened, writer.write("VisibleRows", mask, before=before, fused=True), empty


_FINITE_RESULTS = frozenset({"MatMul", "Gemm", "Einsum", "Softmax", "LayerNormalization", "Tanh", "Sigmoid", "Shape"})
_MAY_DIVERGE = frozenset({"Log", "Div", "Reciprocal", "Pow", "Exp", "Sqrt", "IsInf", "Loop", "If", "Scan"})


def _may_be_infinite(facts: KnownValues, mask: ir.Value) -> bool:
    """Whether minus infinity can be among the numbers of a mask: unless all that it is made of is known and finite."""
    stack, seen = [mask], set[ir.Value]()
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        if len(seen) > _LARGEST_SEARCHED:
            return True
        dtype = facts.dtype(value)
        if dtype is not None and not dtype.is_floating_point():
            continue
        tensor = value.const_value if value.is_initializer() else None
        if tensor is not None:
            if value.name not in facts.weights and not facts.is_finite(value):
                return True
            continue
        node = value.producer()
        if node is None or node.domain != "" or node.op_type in _MAY_DIVERGE:
            return True
        if node.op_type in _FINITE_RESULTS:
            continue
        if node.op_type == "ConstantOfShape":
            if "value" in node.attributes and not all_finite(node.attributes["value"].as_tensor()):
                return True
            continue
        stack.extend(source for source in node.inputs if source is not None)
    return False


def _without_repeats(editor: Editor, key: Operand, value: Operand) -> tuple[Operand, Operand] | None:
    """Keys and values before their heads were repeated for the groups of query heads; None if they were not."""
    keys, values = _before_repeat(editor, key), _before_repeat(editor, value)
    if keys is None or values is None or keys[1] != values[1]:
        return None
    return keys[0], values[0]


def _before_repeat(editor: Editor, operand: Operand) -> tuple[Operand, int] | None:
    """[B, G, S, D] of which `Unsqueeze -> Expand or Tile -> Reshape` made [B, G n, S, D]; and n."""
    reshape = producer(operand.value, "Reshape")
    if operand.order is not None or reshape is None or reshape.inputs[0] is None:
        return None
    repeat = producer(reshape.inputs[0], "Expand", "Tile")
    added = producer(repeat.inputs[0], "Unsqueeze", "Reshape") if repeat is not None else None
    if repeat is None or added is None or added.inputs[0] is None or repeat.inputs[1] is None:
        return None
    source = added.inputs[0]
    before, five = editor.facts.shape(source), editor.facts.shape(added.outputs[0])
    after = editor.facts.shape(operand.value)
    if before is None or five is None or after is None or (len(before), len(five), len(after)) != (4, 5, 4):
        return None
    counts = editor.facts.sizes(repeat.inputs[1])
    if counts is None or len(counts) != 5 or five[2] != 1 or (five[1], five[4]) != (before[1], before[3]):
        return None
    if repeat.op_type == "Tile" and counts[:2] + counts[3:] != (1, 1, 1, 1):
        return None
    heads, repeats = before[1], counts[2]
    if not isinstance(heads, int) or not isinstance(repeats, int) or after[1] != heads * repeats:
        return None
    if repeat.op_type == "Expand" and not _only_repeats_heads(counts, five):
        return None
    return (Operand(source), repeats) if after[3] == before[3] else None


def _only_repeats_heads(counts: tuple[Size, ...], five: tuple[Size | None, ...]) -> bool:
    """Whether an `Expand` of [B, G, 1, S, D] changes the third axis alone, as far as its sizes are known."""
    others = [(counts[axis], five[axis]) for axis in (0, 1, 3, 4)]
    return all(count in (1, size) or size is None or not isinstance(count, int) for count, size in others)


_PLAIN_ATTRIBUTES = frozenset({"scale", "is_causal", "kv_num_heads", "q_num_heads", "qk_matmul_output_mode", "softcap"})


def _replace_standard(editor: Editor, masks: _MaskWriter, node: ir.Node) -> None:
    """The standard's own `Attention` on four axes with a mask: its mask is prepared once for all layers."""
    given = list(node.inputs)
    if len(given) < 4 or given[3] is None or any(value is not None for value in given[4:]):
        return
    if any(value.uses() for value in node.outputs[1:]) or not set(node.attributes) <= _PLAIN_ATTRIBUTES:
        return
    query, key, value, mask = given[:4]
    if query is None or key is None or value is None or mask is None:
        return
    shape = editor.facts.shape(query)
    if (
        shape is None
        or len(shape) != 4
        or integer(node, "is_causal", 0)
        or not editor.are_interior([node], node.outputs[0])
    ):
        return
    if "softcap" in node.attributes and node.attributes["softcap"].as_float():
        return
    scale = node.attributes.get("scale")
    if scale is None and not isinstance(shape[-1], int):
        return
    number = 1 / math.sqrt(int(shape[-1] or 1)) if scale is None else scale.as_float()
    opened, seen, _ = _opened(masks, mask, node, ZERO)
    grouped = _without_repeats(editor, Operand(key), Operand(value))
    if grouped is not None:
        key, value = grouped[0].value, grouped[1].value
    output = editor.write(
        "Attention",
        [query, key, value, opened, seen],
        node,
        fused=True,
        name="attention",
        scale=number,
        dropout_ratio=0.0,
        empty_rows=ZERO,
    )
    editor.replace(node.outputs[0], output, KIND, 1, "the standard's operator, its mask shared by all layers")
