"""The last linear layer and the cross entropy after it become one node, which never holds all logits at once.

The logits stay in the graph where they are an output of the model; a program that computes them anyway takes the loss
from them.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onward.graph.fusion.facts import integer
from onward.graph.fusion.rewriting import Editor, producer

KIND = "cross_entropy"
FEWEST_CLASSES = 256
"""Logits of fewer classes are no larger than the activations before them."""

_MOST_STEPS = 8


@dataclass(frozen=True)
class _Linear:
    """`hidden @ weight + bias`, and the value that is its result.

    Attributes:
        hidden: [..., W].
        weight: [V, W] if `rows_are_classes`, else [W, V].
        bias: [V], or None.
        logits: [..., V].
    """

    hidden: ir.Value
    weight: ir.Value
    rows_are_classes: bool
    bias: ir.Value | None
    logits: ir.Value


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
    attributes: dict[str, int | str] = {"reduction": reduction, "rows_are_classes": int(linear.rows_are_classes)}
    if "ignore_index" in node.attributes:
        attributes["ignore_index"] = node.attributes["ignore_index"].as_int()
    output = editor.write(
        "LinearCrossEntropy",
        [rows, linear.weight, labels, scores, linear.logits, weights, linear.bias],
        node,
        fused=True,
        name=KIND,
        **attributes,
    )
    editor.replace(node.outputs[0], output, KIND, len(steps) + 2, "with the last linear layer, logits never whole")


def _path_to_linear(editor: Editor, scores: ir.Value) -> tuple[_Linear, list[ir.Node]] | None:
    """The linear layer that scores [N, V] come from, and the nodes between, the last first, which only pick rows."""
    steps: list[ir.Node] = []
    value = scores
    for _ in range(_MOST_STEPS):
        linear = _linear(editor, value)
        if linear is not None:
            return linear, steps
        node = producer(value, "Cast", "Reshape", "GatherND", "Slice", "Identity")
        if node is None or node.inputs[0] is None or not _keeps_classes(editor, node):
            return None
        steps.append(node)
        value = node.inputs[0]
    return None


def _keeps_classes(editor: Editor, node: ir.Node) -> bool:
    """Whether a node leaves the last axis, the classes, whole and last."""
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


def _linear(editor: Editor, value: ir.Value) -> _Linear | None:
    """The linear layer whose result a value is."""
    node = producer(value, "MatMul", "Gemm", "Add")
    if node is None:
        return None
    if node.op_type == "Add":
        for product, bias in ((node.inputs[0], node.inputs[1]), (node.inputs[1], node.inputs[0])):
            inner = producer(product, "MatMul")
            if inner is None or bias is None or editor.facts.rank(bias) != 1:
                continue
            found = _of_product(editor, inner, value)
            shape = editor.facts.shape(bias)
            if found is None or shape is None or shape[0] == 1:
                return None
            return _Linear(found.hidden, found.weight, found.rows_are_classes, bias, value)
        return None
    if node.op_type == "MatMul":
        return _of_product(editor, node, value)
    alpha, beta = (node.attributes[n].as_float() if n in node.attributes else 1.0 for n in ("alpha", "beta"))
    hidden, weight = node.inputs[0], node.inputs[1]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if hidden is None or weight is None or alpha != 1.0 or integer(node, "transA", 0):
        return None
    if bias is not None and (beta != 1.0 or editor.facts.rank(bias) != 1 or editor.facts.shape(bias) == (1,)):
        return None
    return _Linear(hidden, weight, bool(integer(node, "transB", 0)), bias, value)


def _of_product(editor: Editor, node: ir.Node, logits: ir.Value) -> _Linear | None:
    hidden, weight = node.inputs
    if hidden is None or weight is None or editor.facts.rank(weight) != 2 or (editor.facts.rank(hidden) or 0) < 2:
        return None
    transpose = producer(weight, "Transpose")
    if transpose is not None and transpose.inputs[0] is not None:
        return _Linear(hidden, transpose.inputs[0], True, None, logits)
    return _Linear(hidden, weight, False, None, logits)


def _rows(editor: Editor, linear: _Linear, steps: list[ir.Node], before: ir.Node) -> ir.Value:
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
    whole = editor.write("Shape", [value], before)
    last = editor.write("Slice", [whole, editor.integers([-1]), editor.integers([2**63 - 1])], before)
    sizes = editor.write("Concat", [lead, last], before, axis=0)
    return editor.write("Reshape", [value, sizes], before)
