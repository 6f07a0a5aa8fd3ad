"""ReLU before a concatenation goes behind it: one call, and nothing is kept twice, in parts and concatenated."""

from __future__ import annotations

from onward.graph.fusion.rewriting import Editor, producer
from onward.graph.nodes.known_values import integer

KIND = "joined_relu"


def fuse_joined_relu(editor: Editor) -> None:
    """Replaces `Concat(Relu(a), Relu(b), ...)` by `Relu(Concat(a, b, ...))`, as in fire modules and dense blocks."""
    for node in editor.nodes("Concat"):
        result = node.outputs[0]
        parts = [producer(value, "Relu") for value in node.inputs]
        relus = [part for part in parts if part is not None]
        sources = [relu.inputs[0] for relu in relus]
        if len(relus) < 2 or len(relus) < len(parts) or result.name in editor.kept:
            continue
        if not editor.are_interior([*relus, node], result):
            continue
        joined = editor.write("Concat", sources, node, name=KIND, axis=integer(node, "axis", 1))
        joined.type, joined.shape = result.type, result.shape
        output = editor.write("Relu", [joined], node, name=KIND)
        editor.replace(result, output, KIND, len(set(relus)) + 1, f"{len(relus)} parts")
