"""ReLU before max pooling goes behind it: the same numbers and gradients, of fewer elements, and fewer are kept."""

from __future__ import annotations

import onnx_ir as ir

from onward.graph.fusion.rewriting import Editor, producer
from onward.graph.nodes.known_values import integers

KIND = "pooled_relu"


def fuse_pooled_relu(editor: Editor) -> None:
    """Replaces `MaxPool(Relu(x))` by `Relu(MaxPool(x))`, as in most networks of convolutions.

    The largest of some numbers is positive exactly if their largest after ReLU is; where none is, neither order has a
    gradient. What a window reads beyond the edge is smaller than all numbers.
    """
    for node in editor.nodes("MaxPool"):
        result, relu = node.outputs[0], producer(node.inputs[0], "Relu")
        gives_places = any(value.uses() or value.is_graph_output() for value in node.outputs[1:])
        if relu is None or gives_places or result.name in editor.kept or not editor.are_interior([relu, node], result):
            continue
        if not _reads_the_image(node):
            continue
        first = editor.new_node("MaxPool", relu.inputs, f"fused/{KIND}", copied=node.attributes.values())
        editor.graph.insert_before(node, first)
        (pooled,) = first.outputs
        pooled.type, pooled.shape = result.type, result.shape
        output = editor.write("Relu", [pooled], node, name=KIND)
        editor.replace(result, output, KIND, 2)


def _reads_the_image(pooling: ir.Node) -> bool:
    """Whether every window reads a part of the image: the largest of padding alone is no number, but its ReLU is 0."""
    kernel, pads, dilations = (integers(pooling, name) or () for name in ("kernel_shape", "pads", "dilations"))
    return set(dilations) <= {1} and all(pad < size for pad, size in zip(pads, (*kernel, *kernel), strict=False))
