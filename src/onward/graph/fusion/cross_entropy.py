"""The last linear layer and the cross entropy after it become one node, which never holds all logits at once.

The logits stay in the graph where they are an output of the model; a program that computes them anyway takes the loss
from them.
"""

from __future__ import annotations

import onnx_ir as ir

from onward.graph.fusion.linear import LinearLayer, find_linear
from onward.graph.fusion.rewriting import Editor, producer
from onward.graph.nodes.known_values import integer

KIND = "cross_entropy"
FUSED_LOSS = "LinearCrossEntropy"
"""A loss with the layer before it."""
FEWEST_CLASSES = 256
"""Logits of fewer classes are no larger than the activations before them."""

_MOST_STEPS = 8


def fuse_cross_entropy(editor: Editor) -> None:
    """Replaces `SoftmaxCrossEntropyLoss` of the logits of a linear layer."""
    for node in editor.nodes("SoftmaxCrossEntropyLoss"):
        _fuse(editor, node)


def _fuse(editor: Editor, node: ir.Node) -> None:
    scores, labels = node.inputs[0], node.inputs[1]
    reduction = node.attributes["reduction"].as_string() if "reduction" in node.attributes else "mean"
    if scores is None or labels is None or reduction not in ("mean", "sum"):
        return
    if len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
        return
    weights = node.inputs[2] if len(node.inputs) > 2 else None
    if weights is not None and (not weights.is_initializer() or weights.name in editor.facts.weights):
        return
    shape = editor.facts.shape(scores)
    if shape is None or len(shape) != 2 or node.outputs[0].name in editor.kept or node.name in editor.kept:
        return
    if not isinstance(shape[1], int) or shape[1] < FEWEST_CLASSES:
        return
    path = _path_to_linear(editor, scores)
    if path is None:
        return
    linear, steps = path
    if editor.facts.opset < 10 and any(step.op_type in ("Slice", "GatherND") for step in steps):
        return
    rows = _rows(editor, linear, steps, node)
    attributes: dict[str, int | str] = {"reduction": reduction, "rows_are_classes": int(linear.rows_are_outputs)}
    if "ignore_index" in node.attributes:
        attributes["ignore_index"] = node.attributes["ignore_index"].as_int()
    output = editor.write(
        FUSED_LOSS,
        [rows, linear.weight, labels, scores, linear.result, weights, linear.bias],
        node,
        fused=True,
        name=KIND,
        **attributes,
    )
    editor.replace(
        node.outputs[0], output, KIND, len(steps) + 2, "with the last linear layer, without materializing all logits"
    )


def _path_to_linear(editor: Editor, scores: ir.Value) -> tuple[LinearLayer, list[ir.Node]] | None:
    """The linear layer that scores [N, V] come from, and the nodes between, the last first, which only pick rows."""
    steps: list[ir.Node] = []
    value = scores
    for _ in range(_MOST_STEPS):
        linear = find_linear(editor, value)
        if linear is not None:
            return linear, steps
        node = producer(value, "Cast", "Reshape", "GatherND", "Slice", "Identity")
        if node is None or node.inputs[0] is None or not _keeps_classes(editor, node):
            return None
        steps.append(node)
        value = node.inputs[0]
    return None


def _keeps_classes(editor: Editor, node: ir.Node) -> bool:
    """Whether a node leaves the last axis, the classes, complete and last."""
    source, result = node.inputs[0], node.outputs[0]
    assert source is not None
    if node.op_type in ("Cast", "Identity"):
        return True
    before, after = editor.facts.shape(source), editor.facts.shape(result)
    if node.op_type == "GatherND":
        indices = None if node.inputs[1] is None else editor.facts.shape(node.inputs[1])
        rank = editor.facts.rank(source)
        picked = indices[-1] if indices else None
        return isinstance(picked, int) and rank is not None and integer(node, "batch_dims", 0) + picked < rank
    if node.op_type == "Slice":
        axes = editor.facts.numbers(node.inputs[3]) if len(node.inputs) > 3 else None
        return before is not None and axes is not None and not {-1, len(before) - 1} & set(axes)
    # Reshape: of as many classes as before, so that rows stay rows, in their order.
    classes = before[-1] if before else None
    sizes = None if node.inputs[1] is None else editor.facts.sizes(node.inputs[1])
    found = (after or sizes or (None,))[-1]
    return isinstance(classes, int) and classes in (found, sizes[-1] if sizes else None)


def _rows(editor: Editor, linear: LinearLayer, steps: list[ir.Node], before: ir.Node) -> ir.Value:
    """The rows of `hidden` that the loss is taken of: what is done to the logits, done before the linear layer."""
    value = linear.hidden
    picking = [place for place, node in enumerate(steps) if node.op_type in ("GatherND", "Slice")]
    for place in reversed(range(picking[0] if picking else len(steps), len(steps))):
        node, name = steps[place], f"{KIND}/{steps[place].op_type}"
        inputs = [value, *node.inputs[1:]]
        if node.op_type == "Slice":
            value = editor.write("Slice", inputs, before, name=name)
        elif node.op_type == "GatherND":
            value = editor.write("GatherND", inputs, before, name=name, batch_dims=integer(node, "batch_dims", 0))
        elif node.op_type == "Reshape":
            value = _reshaped(editor, value, node, before)
    return value


def _reshaped(editor: Editor, value: ir.Value, node: ir.Node, before: ir.Node) -> ir.Value:
    """A value [..., W] in the shape that a node gives to [..., V], but for its last axis."""
    ends = [editor.integers([0]), editor.integers([-1])]
    lead = editor.write("Slice", [node.inputs[1], *ends], before)
    full = editor.write("Shape", [value], before)
    last = editor.write("Slice", [full, editor.integers([-1]), editor.integers([2**63 - 1])], before)
    sizes = editor.write("Concat", [lead, last], before, axis=0)
    return editor.write("Reshape", [value, sizes], before)
