"""How nodes read a weight, as far as a low-rank adapter of it is concerned: in which operator, which way round.

A weight is followed through nodes that only turn it or change its type; quantized ones are read like all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import onnx_ir as ir

from onward.graph.fusion.rewriting import DOMAIN as FUSED
from onward.graph.nodes.known_values import integer, integers
from onward.graph.weights.quantized_weights import PACKED, UNPACKING

MICROSOFT = "com.microsoft"


class Reading(Enum):
    """What a node does with a weight.

    Attributes:
        RIGHT: the right factor of a matrix product.
        LEFT: its left factor.
        LOOKUP: a table of which rows are taken.
        CONVOLUTION: the kernel of a convolution without groups.
        CONTRACTION: an operand of an Einsum that sums over one of the weight's last two axes (`contraction`).
        OTHER: anything else, which gets the sum of the weight and the product of its adapter.
    """

    RIGHT = auto()
    LEFT = auto()
    LOOKUP = auto()
    CONVOLUTION = auto()
    CONTRACTION = auto()
    OTHER = auto()


@dataclass(frozen=True, kw_only=True)
class Use:
    """One node that reads a weight.

    Attributes:
        node: it.
        index: at which input.
        value: what it reads: the weight, or the weight turned, converted or dequantized.
        reading: what it does with it.
        outputs_first: whether the weight, as it is stored, has its outputs on the axis before the last and its inputs
            on the last; else the other way round.
        is_turned: whether `value` is the stored weight with its last two axes swapped.
    """

    node: ir.Node
    index: int
    value: ir.Value
    reading: Reading
    outputs_first: bool
    is_turned: bool


def uses_of(weight: ir.Value, main: ir.Graph) -> list[Use]:
    """All uses of a weight in the main graph and in nested ones; what a nested one does with it is `OTHER`."""
    tensor = weight.const_value
    return [] if tensor is None else _uses(weight, main, len(tensor.shape), False)


def _uses(value: ir.Value, main: ir.Graph, rank: int, is_turned: bool) -> list[Use]:
    found = []
    for use in value.uses():
        node = use.node
        if use.idx == 0 and node.op_type in UNPACKING:
            found += _uses(node.outputs[0], main, 2, is_turned)
            continue
        if use.idx == 0 and node.graph is main and _only_moves(node, rank):
            found += _uses(node.outputs[0], main, rank, is_turned != (node.op_type == "Transpose"))
            continue
        reading, outputs_first = _reading(node, use.idx, rank)
        if node.graph is not main:
            reading = Reading.OTHER
        found.append(
            Use(
                node=node,
                index=use.idx,
                value=value,
                reading=reading,
                outputs_first=outputs_first != is_turned,
                is_turned=is_turned,
            )
        )
    return found


def _only_moves(node: ir.Node, rank: int) -> bool:
    """Whether a node gives the weight as it is, in another type, or with its last two axes swapped."""
    if node.domain not in ("", MICROSOFT) or node.outputs[0].is_graph_output():
        return False
    if node.op_type == "Transpose":
        turned = (*range(rank - 2), rank - 1, rank - 2)
        return integers(node, "perm") == turned or (rank == 2 and integers(node, "perm") is None)
    return node.op_type in ("Identity", "Cast", "DequantizeLinear")


def _reading(node: ir.Node, index: int, rank: int) -> tuple[Reading, bool]:
    """What a node does with a tensor at an input, and whether the outputs come first in it."""
    kind = (node.domain, node.op_type)
    if kind == ("", "MatMul"):
        return (Reading.RIGHT, False) if index == 1 else (Reading.LEFT, True)
    if kind == ("", "Gemm") and index < 2:
        if index == 1:
            return Reading.RIGHT, bool(integer(node, "transB", 0))
        return Reading.LEFT, not integer(node, "transA", 0)
    if kind == (FUSED, "Linear") and index == 1:
        return Reading.RIGHT, bool(integer(node, "rows_are_outputs", 0))
    if node.domain == MICROSOFT and node.op_type in PACKED and index == 1:
        return Reading.RIGHT, bool(integer(node, "transB", 1))
    if kind == ("", "Gather") and index == 0 and rank == 2 and integer(node, "axis", 0) == 0:
        return Reading.LOOKUP, False
    if kind == ("", "Conv") and index == 1 and integer(node, "group", 1) == 1 and rank > 2:
        return Reading.CONVOLUTION, True
    if kind == ("", "Einsum") and contraction(node, index):
        return Reading.CONTRACTION, True
    return Reading.OTHER, kind not in ((MICROSOFT, "Attention"), (MICROSOFT, "QAttention"))


def contraction(node: ir.Node, index: int) -> tuple[str, str, str] | None:
    """The letters of data, weight and result where an Einsum multiplies a matrix, or a stack of them, with data.

    None for other sums: over both of the last axes, none, or along a stack.
    """
    equation = node.attributes["equation"].as_string().replace(" ", "")
    operands, arrow, result = equation.partition("->")
    letters = operands.split(",")
    if not arrow or "." in equation or len(letters) != 2 or len(letters[index]) < 2:
        return None
    weight, data = letters[index], letters[1 - index]
    ends = set(weight[-2:])
    is_product = len(ends & set(data) - set(result)) == 1 and len(ends & set(result) - set(data)) == 1
    is_stack = all(one in data and one in result for one in weight[:-2])
    are_apart = all(len(set(one)) == len(one) for one in (weight, data))
    return (data, weight, result) if is_product and is_stack and are_apart else None
