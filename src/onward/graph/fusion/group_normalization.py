"""Group normalization as it is exported to opsets before 21: an instance normalization of groups between two reshapes.

What scales and shifts every channel afterwards belongs to the node, and images may stay channels-last in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onward.graph.fusion.rewriting import Editor, producer, readers
from onward.graph.nodes.known_values import Size, integer

KIND = "group_normalization"


def fuse_group_normalization(editor: Editor) -> None:
    """Replaces `Reshape(InstanceNormalization(Reshape(x), 1, 0)) * scale + bias`, of as many factors as there are."""
    for node in editor.nodes("InstanceNormalization"):
        before = producer(node.inputs[0], "Reshape")
        x = None if before is None else before.inputs[0]
        if before is None or x is None or not _normalizes_only(editor, node):
            continue
        groups, after = _groups(editor, x, before), readers(node.outputs[0])
        if groups is None or len(after) != 1 or not _restores(editor, after[0], x):
            continue
        nodes, result = [before, node, after[0]], after[0].outputs[0]
        sizes = editor.facts.shape(x) or ()
        scale, result = _of_channels(editor, result, "Mul", sizes, nodes)
        bias, result = (None, result) if scale is None else _of_channels(editor, result, "Add", sizes, nodes)
        if not editor.are_interior(nodes, result):
            continue
        last = nodes[-1]
        inputs = [x, *(_vector(editor, given, last) for given in (scale, bias))]
        epsilon = node.attributes["epsilon"].as_float() if "epsilon" in node.attributes else 1e-5
        output = editor.write(
            "GroupNormalization", inputs, last, fused=True, name=KIND, num_groups=groups, epsilon=epsilon
        )
        editor.replace(result, output, KIND, len(nodes), f"{groups} groups")


def _normalizes_only(editor: Editor, node: ir.Node) -> bool:
    return [editor.facts.filled_with(given) for given in node.inputs[1:]] == [1.0, 0.0]


def _groups(editor: Editor, x: ir.Value, reshape: ir.Node) -> int | None:
    """Into how many groups of whole channels x [N, C, ...] is reshaped; None where N may change."""
    shape, given = editor.facts.shape(x), reshape.inputs[1]
    target = None if given is None else editor.facts.sizes(given)
    if shape is None or len(shape) < 3 or target is None or len(target) < 3:
        return None
    keeps_samples = target[0] == shape[0] or (target[0] == 0 and not integer(reshape, "allowzero", 0))
    channels, groups = shape[1], target[1]
    if not keeps_samples or not isinstance(channels, int) or not isinstance(groups, int) or groups < 1:
        return None
    return groups if channels % groups == 0 else None


def _restores(editor: Editor, node: ir.Node, x: ir.Value) -> bool:
    """Whether a node gives what was reshaped the shape of x again."""
    if node.domain != "" or node.op_type != "Reshape":
        return False
    target = producer(node.inputs[1], "Shape")
    if target is not None and target.inputs[0] is x and not target.attributes:
        return True
    shape = editor.facts.shape(x)
    return shape is not None and None not in shape and editor.facts.shape(node.outputs[0]) == shape


def _of_channels(
    editor: Editor, value: ir.Value, op_type: str, sizes: Sequence[Size | None], nodes: list[ir.Node]
) -> tuple[ir.Value | None, ir.Value]:
    """What every channel of a value of these sizes is multiplied with or added to, and the value then."""
    after = readers(value)
    # Torch's exporter brings factors to the type of what they scale.
    casts = [node for node in after if node.op_type == "CastLike" and node.inputs[0] is not value]
    rest = [node for node in after if node not in casts]
    if len(rest) != 1 or rest[0].op_type != op_type or rest[0].domain != "" or value.is_graph_output():
        return None, value
    node = rest[0]
    if {given for given in node.inputs if given is not value} != {c.outputs[0] for c in casts} and casts:
        return None, value
    other = next((given for given in node.inputs if given is not value), None)
    shape = _shape(editor, other)
    # Axes in front may be left out.
    if other is None or shape not in ((sizes[1], *(1,) * (len(sizes) - 2)), (1, sizes[1], *(1,) * (len(sizes) - 2))):
        return None, value
    nodes += [*casts, node]
    return other, node.outputs[0]


def _shape(editor: Editor, value: ir.Value | None) -> tuple[Size | None, ...] | None:
    """The shape of a value, also of a vector that is unsqueezed by a `Range`, which shape inference does not follow."""
    shape = None if value is None else editor.facts.shape(value)
    node = producer(value, "CastLike", "Unsqueeze")
    if shape is not None or node is None:
        return shape
    source = _shape(editor, node.inputs[0])
    if node.op_type == "CastLike" or source is None:
        return source
    axes = None if len(node.inputs) < 2 else _integers(editor, node.inputs[1])
    if axes is None or min(axes, default=0) < 0:
        return None
    found = list(source)
    for axis in sorted(axes):
        found.insert(axis, 1)
    return tuple(found)


def _integers(editor: Editor, value: ir.Value | None) -> Sequence[int] | None:
    """Integers that a value always holds, or that it counts."""
    counted = producer(value, "Range")
    if counted is None:
        return editor.facts.numbers(value)
    bounds = [editor.facts.number(given) for given in counted.inputs]
    if any(bound is None or not bound.is_integer() for bound in bounds):
        return None
    return range(*(int(bound) for bound in bounds if bound is not None))


def _vector(editor: Editor, value: ir.Value | None, before: ir.Node) -> ir.Value | None:
    """A value of one axis that holds the same: what was unsqueezed, or a reshape."""
    while value is not None and (node := producer(value, "CastLike", "Unsqueeze")) is not None:
        source, like = node.inputs[0], node.inputs[-1]
        assert source is not None
        assert like is not None
        if node.op_type == "CastLike" and editor.facts.dtype(source) != editor.facts.dtype(like):
            break
        value = source
    if value is None or editor.facts.rank(value) == 1:
        return value
    return editor.write("Reshape", [value, editor.integers([-1])], before, name=KIND)
