"""Which weights can be pruned, and along which axis their elements are summed over."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.fusion.rewriting import DOMAIN
from onward.graph.operators import Fact, operators_with
from onward.graph.weights.names import WeightNames
from onward.spelling import shortened

_SAME = operators_with(Fact.UNARY) & {"Identity", "Cast"} | {"Identity", "Cast", "QuantizeLinear", "DequantizeLinear"}
_LISTED = 3


def prunable_weights(
    graph: ir.Graph, weights: Collection[str], patterns: Collection[str], known_as: WeightNames, in_fours: bool
) -> tuple[dict[str, int], tuple[str, ...]]:
    """The weights to prune, each with the axis that convolutions and matmuls sum over, and notes for the user.

    Args:
        graph: the network.
        weights: that are trained.
        patterns: of those to prune; empty: all that convolutions and matmuls read.
        known_as: module paths, which patterns may name.
        in_fours: whether the size of that axis must be a multiple of four.

    Raises:
        ModelError: a pattern matches nothing, or there is nothing to prune.
    """
    axes = {name: _summed_axis(graph.initializers[name]) for name in weights if name in graph.initializers}
    for pattern in patterns:
        if not any(known_as.matches(name, [pattern]) for name in axes):
            raise ModelError(
                f"pruning.weights: {pattern!r} matches none of the {len(axes)} trainable weights. They are "
                f"{known_as.listed(tuple(axes), 3)}; `onward inspect` lists them."
            )
    asked = [name for name in axes if not patterns or known_as.matches(name, list(patterns))]
    found, left = {}, []
    for name in asked:
        axis, stored = axes[name], graph.initializers[name].const_value
        if axis is None and (in_fours or not patterns):
            left += [name] if patterns else []
        elif in_fours and axis is not None and stored is not None and int(stored.shape.numpy()[axis]) % 4:
            left.append(name)
        else:
            found[name] = 0 if axis is None else axis
    if not found:
        raise ModelError(
            "pruning.pattern is set, but no trainable weight can be pruned"
            + (f": {shortened(map(repr, left), _LISTED)} do not sum over a multiple of four elements" if left else "")
            + ". Remove it, or name weights in pruning.weights."
        )
    notes = [f"pruning: {len(found)} of {len(axes)} weights ({known_as.listed(tuple(found), _LISTED)})."]
    if left:
        stay = "stays" if len(left) == 1 else "stay"
        notes.append(
            f"pruning: {shortened(map(repr, left), _LISTED)} {stay} dense: no sum over a multiple of four elements."
        )
    return found, tuple(notes)


def _summed_axis(weight: ir.Value) -> int | None:
    """The axis of a weight that convolutions and matmuls sum over; None: not all that read it agree on one."""
    stored = weight.const_value
    if stored is None or len(stored.shape) < 2:
        return None
    found = set(_axes(weight, tuple(range(len(stored.shape)))))
    return found.pop() if len(found) == 1 else None


def _axes(value: ir.Value, axes: tuple[int, ...]) -> Iterator[int | None]:
    """Of each use the axis of the weight; `axes` are those of the weight in the order that the value has them."""
    for node, index in value.uses():
        if node.op_type in _SAME and index == 0:
            yield from _axes(node.outputs[0], axes)
        elif node.op_type == "Transpose":
            order = node.attributes.get("perm")
            moved = tuple(reversed(axes)) if order is None else tuple(axes[one] for one in order.as_ints())
            yield from _axes(node.outputs[0], moved)
        elif node.op_type in ("MovingScale", "Shape"):
            continue
        else:
            own = _own_axis(node, index, len(axes))
            yield None if own is None else axes[own]


def _own_axis(node: ir.Node, index: int, rank: int) -> int | None:
    if index == 1 and node.op_type == "Conv" and node.domain == "":
        return 1
    if index == 1 and node.op_type == "MatMul" and node.domain == "":
        return rank - 2
    if index == 1 and (
        (node.op_type == "Gemm" and node.domain == "") or (node.op_type, node.domain) == ("Linear", DOMAIN)
    ):
        turned = node.attributes.get("transB") or node.attributes.get("rows_are_outputs")
        return 1 if turned is not None and turned.as_int() else 0
    return None
