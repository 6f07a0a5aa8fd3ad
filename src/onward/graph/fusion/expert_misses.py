"""Mixtures of experts that stay as they are exported: which module they are of, and where reading them ended."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from onward.graph.fusion.expert_axes import Meaning
from onward.graph.fusion.expert_body import Formula
from onward.graph.fusion.expert_reading import ExpertReader
from onward.graph.fusion.rewriting import stored_behind
from onward.graph.nodes.provenance import shown_node

UNKNOWN_BODY = "its experts are no linear layer, activation and linear layer back, with or without a gate"
SHARED_WEIGHTS = "experts share weights, or are weighed by several routers"

_MOVING = {"Cast", "Expand", "Gather", "GatherND", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose",
           "Unsqueeze"}  # fmt: skip
_PROGRESS = ("scores", "mask", "masked", "gates", "places", "body", "stack", "weighted", "sum")
"""How far reading came, by kinds of values."""


def unknown_body(formula: Formula) -> str:
    """Why experts are none, with the last operator before what was read of them."""
    (*_, first) = formula.steps()
    node = None if first.value is None else first.value.producer()
    return UNKNOWN_BODY + ("" if node is None else f" ({node.op_type} at {shown_node(node)} is read as their input)")


def read_elsewhere(value: ir.Value) -> str:
    """Why a mixture that is read cannot become one node."""
    return f"what it computes on the way is read elsewhere, too, or asked for by name ({value.name!r})"


def reason_of(reader: ExpertReader, after: Iterable[ir.Value], known: str | None) -> str | None:
    """Why what follows a router was not fused; None where it is not evidently a mixture.

    Args:
        reader: that tried, from the choices on.
        after: values that depend on the choices, nearest first.
        known: what kept a mixture from being fused that was read to its end.
    """
    nodes = [node for value in after if (node := value.producer()) is not None]
    if known is None and not _has_experts(reader, nodes):
        return None
    known = known or _end_of_reading(reader, nodes)
    router = reader.chosen.producer()
    assert router is not None
    return (
        f"a mixture of {reader.experts} experts, {reader.choices} for each token, stays as it is exported, and its "
        f"experts cannot be shared among ranks. Its router is {shown_node(router)}; {known}. "
        "docs/explanation/fusion.md lists the forms that become one node."
    )


def _has_experts(reader: ExpertReader, nodes: Iterable[ir.Node]) -> bool:
    """Whether single experts are picked, or a stack of their weights is read."""
    picked = {meaning.expert for meaning in reader.found.values() if meaning is not None} - {None}
    return len(picked) > 1 or any(_is_stack(given, reader.experts) for node in nodes for given in node.inputs)


def _is_stack(value: ir.Value | None, experts: int) -> bool:
    """Whether a value is weights, or comes from weights, of which the first axis counts experts."""
    stored = stored_behind(value, _MOVING)
    if stored is None or stored.const_value is None:
        return False
    return len(stored.const_value.shape) == 3 and stored.const_value.shape[0] == experts


def _end_of_reading(reader: ExpertReader, nodes: Iterable[ir.Node]) -> str:
    """The first node of unknown meaning after the values that were understood best."""
    best, found = -1, None
    for node in nodes:
        if any(_is_understood(reader.found.get(value)) for value in node.outputs):
            continue
        kinds = [m.kind for given in node.inputs if given is not None and (m := reader.found.get(given)) is not None]
        progress = max((_PROGRESS.index(kind) for kind in kinds if kind in _PROGRESS), default=-1)
        if progress > best:
            best, found = progress, node
    if found is None:
        return "no operator after it is known"
    found = _first_unknown(reader, found)
    return f"reading it ended at {shown_node(found)}, an operator {found.op_type} with a meaning that is not known"


def _is_understood(meaning: Meaning | None) -> bool:
    """Whether a value that depends on the choices is more than tokens by its shape."""
    return meaning is not None and not (meaning.kind == "body" and meaning.data.kind == "tokens")


def _first_unknown(reader: ExpertReader, node: ir.Node) -> ir.Node:
    """Of an unknown node and those before it, one whose operands are known."""
    for _ in range(64):
        unknown = (value.producer() for value in node.inputs if value is not None and reader.meaning(value) is None)
        before = next((source for source in unknown if source is not None), None)
        if before is None:
            break
        node = before
    return node
