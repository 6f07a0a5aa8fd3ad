"""Inputs that hold the keys and values of earlier tokens (a KV cache): which they are, and graphs with empty ones."""

from __future__ import annotations

import re

import onnx_ir as ir

from onward.graph.nodes.known_values import integer

_NAME = re.compile(r"past|cache", re.IGNORECASE)
_PAST = {
    ("com.microsoft", "GroupQueryAttention"): (3, 4),
    ("com.microsoft", "MultiHeadAttention"): (6, 7),
    ("com.microsoft", "Attention"): (4,),
    ("", "Attention"): (4, 5),
}
"""Operator -> its optional inputs that hold a cache, in which the last axis but one counts the tokens."""


def cached_axis(value: ir.Value) -> int | None:
    """The axis of an input along which the tokens of a cache are; None: it is no cache, or its length is fixed."""
    if value.shape is None or not _NAME.search(str(value.name)):
        return None
    rank = len(value.shape)
    for use in value.uses():
        axis = None
        if use.idx in _PAST.get((use.node.domain, use.node.op_type), ()):
            axis = rank - 2
        elif use.node.domain == "" and use.node.op_type == "Concat" and use.idx == 0:
            axis = integer(use.node, "axis", 0) % rank
        if axis and not isinstance(value.shape[axis], int):
            return axis
    return None


def attend_to_no_past(value: ir.Value) -> None:
    """Takes a cache from the attention operators that read it, to which it is optional."""
    for use in tuple(value.uses()):
        if use.idx in _PAST.get((use.node.domain, use.node.op_type), ()):
            use.node.replace_input_with(use.idx, None)
