"""A mixture of experts, as loops over experts, stacks of weights or products of all experts, becomes one node.

The node computes each expert for the tokens that chose it only, and one process of several can hold some of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx_ir as ir

from onward.graph.fusion.contributed_experts import KIND, fuse_contributed
from onward.graph.fusion.expert_axes import Derived, Meaning, Shares
from onward.graph.fusion.expert_body import Body, WeightOf, read_body, stacked_weights
from onward.graph.fusion.expert_misses import SHARED_WEIGHTS, read_elsewhere, reason_of, unknown_body
from onward.graph.fusion.expert_reading import ExpertReader
from onward.graph.fusion.expert_slots import fuse_slots
from onward.graph.fusion.rewriting import Editor, readers
from onward.graph.nodes.known_values import integer

_FIRST_OPSET = 13
"""Before it, the axes of sums are attributes, and nobody exported mixtures of experts."""


def fuse_experts(editor: Editor) -> None:
    """Replaces what is computed of the choices of a `TopK` or `ArgMax`, or of slots, and `MoE` of ONNX Runtime."""
    if editor.facts.opset < _FIRST_OPSET:
        return
    missed = list[tuple[str, list[ir.Node]]]()
    for node in editor.nodes("TopK", "ArgMax"):
        scores = None if node.inputs[0] is None else editor.facts.shape(node.inputs[0])
        choices = editor.facts.number(node.inputs[1]) if node.op_type == "TopK" else 1
        axis = integer(node, "axis", -1 if node.op_type == "TopK" else 0)
        if scores is None or choices is None or axis not in (-1, len(scores) - 1):
            continue
        if isinstance(scores[-1], int) and scores[-1] > 1 and len(scores) > 1:
            reader = ExpertReader(editor, node, scores[-1], int(choices))
            after = list[ir.Value]()
            if not _fuse(editor, reader, after) and (reason := reason_of(reader, after, reader.obstacle)) is not None:
                missed.append((reason, [made for value in after if (made := value.producer()) is not None]))
    fuse_slots(editor)
    editor.missed += [reason for reason, nodes in missed if all(node.graph is not None for node in nodes)]
    fuse_contributed(editor)


def _fuse(editor: Editor, reader: ExpertReader, after: list[ir.Value]) -> bool:
    """Whether a mixture became one node; else `after` are the values that were looked at."""
    for value in _values_after(reader):
        after.append(value)
        meaning = reader.meaning(value)
        if meaning is None or meaning.kind != "sum" or meaning.axes[:-1] != reader.tokens or len(meaning.axes[-1]) != 1:
            continue
        keys, terms = [*meaning.data], meaning.data
        if keys != [-1] and sorted(keys) != list(range(reader.experts)):
            continue
        shares = {share for _, share in terms.values()}
        bodies = [body for key in sorted(keys) if (body := read_body(terms[key][0])) is not None]
        unread = [terms[key][0] for key in sorted(keys) if read_body(terms[key][0]) is None]
        weights = stacked_weights(bodies, reader.experts) if len(bodies) == len(keys) and len(shares) == 1 else None
        nodes = _nodes_of(reader, value, bodies[0].tokens) if bodies else []
        if weights is None:
            reader.obstacle = unknown_body(unread[0]) if unread else SHARED_WEIGHTS
        elif value.name in editor.kept or not editor.are_interior(nodes, value):
            reader.obstacle = read_elsewhere(value)
        else:
            _write(editor, reader, value, bodies[0], weights, shares.pop(), len(nodes))
            return True
    return False


def _values_after(reader: ExpertReader) -> Iterator[ir.Value]:
    """The values that depend on the choices, nearest first, until a mixture's own values end."""
    seen: dict[ir.Value, None] = dict.fromkeys((reader.chosen, *reader.chosen.producer().outputs))  # type: ignore[union-attr]
    queue = list(seen)
    while queue and len(seen) < _MOST_VALUES * (reader.experts + 1):
        value = queue.pop(0)
        for node in readers(value):
            for output in node.outputs:
                if output in seen:
                    continue
                seen[output] = None
                yield output
                meaning = reader.meaning(output)
                if meaning is None or meaning.kind != "sum":
                    queue.append(output)
                elif meaning.axes[:-1] == reader.tokens:
                    queue.insert(0, output)


_MOST_VALUES = 40
"""Looked at for every expert."""


def _nodes_of(reader: ExpertReader, result: ir.Value, tokens: ir.Value) -> list[ir.Node]:
    """The nodes from the tokens to a result that compute experts, and what is made of it."""
    found: dict[ir.Node, None] = {}
    waiting = [result]
    while waiting:
        value = waiting.pop()
        node, meaning = value.producer(), reader.found.get(value)
        if meaning is None or node is None or value is tokens or node in found or not _is_computed(meaning):
            continue
        found[node] = None
        waiting += [given for given in node.inputs if given is not None]
    return list(found)


def _is_computed(meaning: Meaning) -> bool:
    return meaning.kind in ("weighted", "stack", "sum") or (meaning.kind == "body" and meaning.data.kind != "tokens")


def _write(
    editor: Editor,
    reader: ExpertReader,
    result: ir.Value,
    body: Body,
    weights: list[list[ir.Value]],
    shares: Shares,
    count: int,
) -> None:
    node = result.producer()
    assert node is not None
    if isinstance(shares, Derived):
        more: dict[str, Any] = {"axis": -1} if shares.op_type == "Softmax" else {}
        shares = editor.write(shares.op_type, [shares.value], node, name=KIND, **more)
    output = editor.write(
        "Experts",
        [body.tokens, reader.chosen, shares, *(value for values in weights for value in values)],
        node,
        fused=True,
        name=KIND,
        experts=reader.experts,
        hidden=_hidden(editor, body.layers[-1].weight),
        **body.attributes(),
    )
    editor.replace(result, output, KIND, count, f"{reader.experts} experts, {reader.choices} for each token")


def _hidden(editor: Editor, down: WeightOf) -> int:
    """How many features an expert has between its layers."""
    size = (editor.facts.shape(down.value) or ())[-1 if down.rows_are_outputs else -2]
    return size if isinstance(size, int) else 0
