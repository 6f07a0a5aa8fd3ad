"""All fusions in order, on a prepared model: what each is called, and what was fused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import onnx_ir as ir

from onward.graph.fusion import (
    activation,
    attention,
    concatenation,
    contributed_experts,
    cross_entropy,
    embedding_bag,
    experts,
    group_normalization,
    linear,
    normalization,
    pooling,
    rotary,
    selection,
)
from onward.graph.fusion.rewriting import DOMAIN, Editor, Fused, Fusion
from onward.graph.nodes.known_values import KnownValues, integer

FUSIONS: Mapping[str, Callable[[Editor], None]] = {
    attention.KIND: attention.fuse_attention,
    "normalization": normalization.fuse_normalization,
    group_normalization.KIND: group_normalization.fuse_group_normalization,
    activation.GELU: activation.fuse_gelu,
    activation.SWISH: activation.fuse_swish,
    activation.SWIGLU: activation.fuse_swiglu,
    selection.SOFTPLUS: selection.fuse_softplus,
    selection.NAN_TO_NUM: selection.fuse_nan_to_num,
    rotary.KIND: rotary.fuse_rotary,
    cross_entropy.KIND: cross_entropy.fuse_cross_entropy,
    linear.KIND: linear.fuse_linear,
    concatenation.KIND: concatenation.fuse_joined_relu,
    pooling.KIND: pooling.fuse_pooled_relu,
    contributed_experts.KIND: experts.fuse_experts,
    embedding_bag.KIND: embedding_bag.fuse_embedding_bag,
}
"""Fusion, as `speed.fusions_off` names it -> what does it, in the order in which they run."""


def fuse(
    model: ir.Model,
    weights: Collection[str] = (),
    off: Collection[str] = (),
    keep: Collection[str] = (),
    inferred: Mapping[str, ir.Value] | None = None,
) -> Fused:
    """Fuses in place what is written out; initializers stay as they are, under their names.

    Args:
        model: prepared for lowering.
        weights: initializers that train; they are taken for no constants.
        off: names of fusions to leave out.
        keep: names of values that must stay computed, and of nodes that must stay as they are; in a text with a
            colon (a place where stages are cut) every name counts.
        inferred: what shape inference found in this very graph; None: it is run here.
    """
    facts = KnownValues(model, weights, inferred)
    editor = Editor(model, facts, names_in(model.graph, keep))
    _drop_copies(editor)
    for name, function in FUSIONS.items():
        if name not in off:
            function(editor)
    if editor.done:
        model.graph.sort()
    return Fused(tuple(editor.done), tuple(editor.missed))


def notes_on_fusions(fusions: Sequence[Fusion]) -> tuple[str, ...]:
    """One sentence that counts the fusions; none where there are none."""
    if not fusions:
        return ()
    counts = Counter(fusion.kind for fusion in fusions)
    listed = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    replaced = sum(fusion.replaced for fusion in fusions)
    return (f"fused for training, not in what is exported: {listed} ({replaced} nodes became {len(fusions)}).",)


def names_in(graph: ir.Graph, texts: Collection[str]) -> frozenset[str]:
    """The names of values and nodes that texts are, or speak of."""
    phrases = [text for text in texts if ":" in text]
    if not phrases:
        return frozenset(texts)
    names = {str(name) for node in graph for name in (node.name, *(value.name for value in node.outputs)) if name}
    return frozenset(texts) | {name for name in names if any(name in phrase for phrase in phrases)}


def _drop_copies(editor: Editor) -> None:
    """Nodes that give out what they take in: `Identity`, `Cast` to the type of a value, `Slice` from end to end."""
    for node in editor.nodes("Identity", "Cast", "Slice", "CastLike"):
        source, result = node.inputs[0], node.outputs[0]
        if source is None or result.is_graph_output() or result.name in editor.kept or node.name in editor.kept:
            continue
        if node.op_type == "CastLike":
            # A constant in the type that it has; torch's newer exporter puts one before every factor.
            like = None if node.inputs[1] is None else editor.facts.dtype(node.inputs[1])
            if editor.facts.number(source) is None or like is None or like is not editor.facts.dtype(source):
                continue
        elif source.is_initializer():
            continue
        if node.op_type == "Cast":
            dtype = editor.facts.dtype(source)
            # What the model says is float32 is computed in 16 bits in mixed precision; such a cast widens it.
            if dtype is None or dtype.is_floating_point() or int(dtype) != integer(node, "to", 0):
                continue
        if node.op_type == "Slice" and not _takes_all(editor.facts, node):
            continue
        result.replace_all_uses_with(source)
        editor.remove_unread([node])


def _takes_all(facts: KnownValues, node: ir.Node) -> bool:
    bounds = [facts.numbers(given) for given in node.inputs[1:]]
    if len(bounds) < 2 or bounds[0] is None or bounds[1] is None or (len(bounds) > 3 and bounds[3] is None):
        return False
    steps = bounds[3] if len(bounds) > 3 and bounds[3] is not None else (1,)
    return set(bounds[0]) == {0} and set(steps) == {1} and min(bounds[1]) >= _BEYOND_ANY_SIZE


_BEYOND_ANY_SIZE = 2**31 - 1

__all__ = ["DOMAIN", "FUSIONS", "Fused", "Fusion", "fuse", "notes_on_fusions"]
