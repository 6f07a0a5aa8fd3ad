"""Layer normalization and RMS normalization written out: means, squares, a root, a quotient.

x is normalized over its last axes; what scales and shifts it afterwards belongs to the node where it is a vector over
these axes.
"""

from __future__ import annotations

import onnx_ir as ir

from onward.graph.fusion.rewriting import Editor, other_input, producer, readers
from onward.graph.nodes.known_values import integer

LAYER, RMS = "layer_normalization", "rms_normalization"


def fuse_normalization(editor: Editor) -> None:
    """Replaces normalizations, wherever the root of a mean of squares is in the middle of one, and standardizations."""
    for node in editor.nodes("BatchNormalization"):
        _fuse_standardization(editor, node)
    for node in editor.nodes("Sqrt", "Pow"):
        if node.op_type == "Pow" and not (
            editor.facts.is_number(node.inputs[1], 0.5) or editor.facts.is_number(node.inputs[1], -0.5)
        ):
            continue
        _fuse_around(editor, node)


def _fuse_standardization(editor: Editor, node: ir.Node) -> None:
    """A batch normalization of one sample by its own statistics, as of the weights of a convolution (Qiao, 2019)."""
    x, scale, bias, mean, variance = node.inputs
    shape = None if x is None else editor.facts.shape(x)
    if x is None or shape is None or len(shape) != 3 or shape[0] != 1 or node.name in editor.kept:
        return
    is_standard = [editor.facts.filled_with(given) for given in (scale, bias)] == [1.0, 0.0]
    if not is_standard or integer(node, "training_mode", 0) or not _is_mean(editor, mean, x, keeps=0):
        return
    square = producer(variance, "ReduceMean")
    factors = producer(None if square is None else square.inputs[0], "Mul")
    centred = producer(None if factors is None else factors.inputs[0], "Sub")
    if factors is None or centred is None or factors.inputs[0] is not factors.inputs[1] or centred.inputs[0] is not x:
        return
    if not _is_mean(editor, variance, factors.outputs[0], keeps=0):
        return
    if not _is_mean(editor, centred.inputs[1], x, keeps=1):
        return
    epsilon = node.attributes["epsilon"].as_float() if "epsilon" in node.attributes else 1e-5
    output = editor.write("LayerNormalization", [x], node, fused=True, name=LAYER, axis=-1, epsilon=epsilon)
    editor.replace(node.outputs[0], output, LAYER, 1, "of weights")


def _is_mean(editor: Editor, value: ir.Value | None, x: ir.Value, keeps: int) -> bool:
    """Whether a value is the mean of x [1, C, N] over all axes but that of the channels, which it keeps or not."""
    mean = producer(value, "ReduceMean")
    if mean is None or mean.inputs[0] is not x or integer(mean, "keepdims", 1) != keeps:
        return False
    axes = editor.facts.axes(mean)
    return axes is not None and {axis % 3 for axis in axes} in ({2}, {0, 2})


def _fuse_around(editor: Editor, root: ir.Node) -> None:
    found = _mean_of_squares(editor, root)
    if found is None:
        return
    squared, epsilon, count, nodes = found
    nodes.append(root)
    result = _quotient(editor, root, squared, nodes)
    if result is None:
        return
    x, centred = _before_centring(editor, squared, count)
    if centred is not None:
        nodes += centred
    kind = RMS if centred is None else LAYER
    interior = set(nodes)
    if centred is None and squared.producer() in interior:
        return
    if not editor.are_interior(interior, result):
        return
    scale, result = _parameter(editor, result, "Mul", count, nodes)
    bias, result = _parameter(editor, result, "Add", count, nodes) if kind == LAYER else (None, result)
    last = result.producer()
    assert last is not None
    op_type = "LayerNormalization" if kind == LAYER else "RMSNormalization"
    inputs = [x, scale, bias]
    output = editor.write(op_type, inputs, last, fused=True, name=kind, axis=-count, epsilon=epsilon)
    editor.replace(result, output, kind, len(nodes))


def _mean_of_squares(editor: Editor, root: ir.Node) -> tuple[ir.Value, float, int, list[ir.Node]] | None:
    """c, epsilon and the number of axes of `sqrt(mean(c²) + epsilon)`, and the nodes before the root."""
    added = producer(root.inputs[0], "Add")
    if added is None:
        return None
    for index in (0, 1):
        epsilon = editor.facts.number(added.inputs[index])
        mean = producer(added.inputs[1 - index], "ReduceMean")
        if epsilon is None or mean is None:
            continue
        square = producer(mean.inputs[0], "Mul", "Pow")
        count = _reduced_axes(editor, mean)
        if square is None or count is None or square.inputs[0] is None:
            return None
        is_square = (
            square.inputs[1] is square.inputs[0]
            if square.op_type == "Mul"
            else (editor.facts.is_number(square.inputs[1], 2.0))
        )
        return (square.inputs[0], epsilon, count, [square, mean, added]) if is_square else None
    return None


def _reduced_axes(editor: Editor, mean: ir.Node) -> int | None:
    """Over how many last axes a mean goes that keeps them as 1; None if it goes over others."""
    source = mean.inputs[0]
    rank = None if source is None else editor.facts.rank(source)
    axes = editor.facts.axes(mean)
    if not axes or not integer(mean, "keepdims", 1):
        return None
    if axes in ((-1,), (-2, -1), (-3, -2, -1)):
        return len(axes)
    if rank is None:
        return None
    places = sorted(axis % rank for axis in axes)
    return len(places) if places == list(range(rank - len(places), rank)) else None


def _quotient(editor: Editor, root: ir.Node, numerator: ir.Value, nodes: list[ir.Node]) -> ir.Value | None:
    """The value that is the numerator divided by the root; its nodes are added to the list."""
    inverse = root.op_type == "Pow" and editor.facts.is_number(root.inputs[1], -0.5)
    value = root.outputs[0]
    after = readers(value)
    if not inverse and len(after) == 1 and after[0].domain == "":
        node = after[0]
        if node.op_type == "Reciprocal" or (
            node.op_type == "Div" and node.inputs[1] is value and editor.facts.is_number(node.inputs[0], 1.0)
        ):
            nodes.append(node)
            inverse, value = True, node.outputs[0]
            after = readers(value)
    for node in after:
        other = other_input(node, value) if node.domain == "" else None
        copies = None if other is None else _copies(editor, other, numerator)
        if copies is None:
            continue
        nodes += copies
        if (node.op_type == "Mul" and inverse) or (node.op_type == "Div" and not inverse and node.inputs[1] is value):
            nodes.append(node)
            return node.outputs[0]
    return None


def _copies(editor: Editor, value: ir.Value, original: ir.Value) -> list[ir.Node] | None:
    """The nodes that compute a value a second time; none for the value itself; None if it is another value."""
    if value is original:
        return []
    node = producer(value, "Sub")
    if node is None or editor.facts.signature(value) != editor.facts.signature(original):
        return None
    before = producer(original, "Sub")
    mean = producer(node.inputs[1], "ReduceMean")
    twice = before is None or mean is None or before.inputs[1] is not mean.outputs[0]
    return [node, mean] if twice and mean is not None else [node]


def _before_centring(editor: Editor, centred: ir.Value, count: int) -> tuple[ir.Value, list[ir.Node] | None]:
    """x of `x - mean(x)`, and the nodes of it; the value itself, and None, if it is no such difference."""
    difference = producer(centred, "Sub")
    if difference is None or difference.inputs[0] is None:
        return centred, None
    x = difference.inputs[0]
    mean = producer(difference.inputs[1], "ReduceMean")
    if mean is None or mean.inputs[0] is not x or _reduced_axes(editor, mean) != count:
        return centred, None
    return x, [mean, difference]


def _parameter(
    editor: Editor, value: ir.Value, op_type: str, count: int, nodes: list[ir.Node]
) -> tuple[ir.Value | None, ir.Value]:
    """What scales or shifts a normalized value right after it, and the value then; None where nothing does."""
    after = readers(value)
    if len(after) != 1 or after[0].op_type != op_type or after[0].domain != "":
        return None, value
    node = after[0]
    other = other_input(node, value)
    shape = None if other is None else editor.facts.shape(other)
    sizes = editor.facts.shape(value)
    if other is None or shape is None or sizes is None or not editor.is_free(value, within=[node]):
        return None, value
    if len(shape) != count or tuple(shape) != tuple(sizes[-count:]) or None in shape:
        return None, value
    nodes.append(node)
    return other, node.outputs[0]
