"""A new last layer for other classes than the file was trained for, put into the user's own graph.

Names stay; the weight and the bias of the layer, and the sizes that follow from them, change.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod, sqrt

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.nodes.known_values import integer
from onward.graph.nodes.node_writer import TakenNames, free_name, original, remove_unread, value_names
from onward.graph.nodes.provenance import shown_node
from onward.graph.operators import Fact, operators_with
from onward.graph.reading.model_file import ModelSource, read_model
from onward.parameters.limits import Limits

_FOLLOWED = (
    operators_with(Fact.UNARY)
    | operators_with(Fact.SAME_ELEMENTS)
    | {"AveragePool", "Cast", "Clip", "Dropout", "GlobalAveragePool", "LogSoftmax", "ReduceMean", "Softmax"}
)
"""Operators between the last layer and a prediction that compute class by class, or over all classes alike."""

_WEIGHT = 1
"""The input of a linear layer that is its weight."""

Place = tuple[ir.Node, int]
"""A node, and which of its inputs."""


@dataclass(frozen=True, kw_only=True)
class LastLayer:
    """The linear layer that a prediction comes from.

    Attributes:
        weight: of a `Gemm`, `MatMul` or `Conv`.
        axis: of the weight: the classes.
        num_classes: the size of that axis.
        biases: where a number for each class is added.
        shapes: where a constant shape after the layer holds the number of classes.
    """

    weight: Place
    axis: int
    num_classes: int
    biases: tuple[Place, ...]
    shapes: tuple[Place, ...]


@dataclass(frozen=True)
class NewHead:
    """What was replaced.

    Attributes:
        names: initializers with new values, which have to be trained.
        note: a sentence for the user.
    """

    names: tuple[str, ...]
    note: str


def with_new_head(
    source: ModelSource, prediction: str | None, num_classes: int | None, seed: int, limits: Limits
) -> tuple[ModelSource, NewHead | None]:
    """A model whose last layer is replaced, where that is asked for: `replace_head` of what `source` holds."""
    if num_classes is None or prediction is None:
        return source, None
    model = read_model(source, limits)
    return model, replace_head(model, prediction, num_classes, seed)


def replace_head(model: ir.Model, prediction: str, num_classes: int, seed: int = 0) -> NewHead:
    """Gives the layer that computes a prediction another number of classes, in place.

    The weight begins uniform in +-1/sqrt(inputs), as that of `torch.nn.Linear`, the bias at zero. A layer that has
    that many classes already is kept, with its weights.

    Args:
        model: as it was read.
        prediction: the value with a score for each class.
        num_classes: of the new layer.
        seed: of its weight.

    Raises:
        ModelError: there is no such value or layer, or others read its weight.
    """
    layer = find_last_layer(model.graph, prediction)
    if layer.num_classes == num_classes:
        return NewHead((), f"head.num_classes is {num_classes}, which the last layer has already; it is kept.")
    _refuse_shared(layer, num_classes)
    taken = value_names(model.graph)
    weight, *others = (_own(model.graph, *place, taken) for place in (layer.weight, *layer.biases))
    shape = list(_array(weight).shape)
    shape[layer.axis] = num_classes
    bound = 1 / sqrt(prod(shape) // num_classes)
    _give(weight, np.random.default_rng(seed).uniform(-bound, bound, shape))
    for bias in others:
        _give(bias, np.zeros([1 if size == 1 else num_classes for size in _array(bias).shape]))
    for place in layer.shapes:
        sizes = _own(model.graph, *place, taken)
        _give(sizes, np.where(_array(sizes) == layer.num_classes, num_classes, _array(sizes)))
    _resize(layer, num_classes)
    return NewHead(
        tuple(str(value.name) for value in (weight, *others)),
        f"the last layer, {shown_node(layer.weight[0])!r}, had {layer.num_classes} outputs; a new one with "
        f"{num_classes} replaces it, which is not trained yet.",
    )


def find_last_layer(graph: ir.Graph, prediction: str) -> LastLayer:
    """The linear layer from which a prediction is computed class by class.

    Raises:
        ModelError: there is no such value, or its last layer is of another kind.
    """
    value = next((one for one in _values(graph) if one.name == prediction), None)
    if value is None:
        raise ModelError(f"loss.prediction is {prediction!r}, which no node of the model computes.")
    added, shapes = list[Place](), list[Place]()
    while (node := value.producer()) is not None and (layer := _linear(node)) is None:
        stored = [index for index, one in enumerate(node.inputs) if _stored(one) is not None]
        if node.op_type == "Add" and len(stored) == 1:
            added.append((node, stored[0]))
        elif node.op_type not in _FOLLOWED or 0 in stored:
            break
        elif node.op_type == "Reshape" and stored:
            shapes.append((node, 1))
        following = node.inputs[1 - stored[0] if node.op_type == "Add" else 0]
        assert following is not None
        value = following
    if node is None or layer is None:
        raise ModelError(_why_no_layer(prediction, node))
    axis, bias = layer
    count = _array(node.inputs[_WEIGHT]).shape[axis]
    places = [*([] if bias is None else [(node, bias)]), *added]
    for adding, index in places:
        if (size := _array(adding.inputs[index]).size) not in (1, count):
            raise ModelError(
                f"head.num_classes is set, but {shown_node(adding)!r} adds {size} numbers to the {count} outputs of "
                f"{shown_node(node)!r}. Replace the last layer in the model itself."
            )
    per_class = tuple(place for place in places if _array(place[0].inputs[place[1]]).size == count)
    holding = tuple(place for place in shapes if count in _array(place[0].inputs[place[1]]))
    return LastLayer(weight=(node, _WEIGHT), axis=axis, num_classes=count, biases=per_class, shapes=holding)


def has_head(graph: ir.Graph, prediction: str) -> bool:
    """Whether `replace_head` could give the prediction another number of classes."""
    try:
        layer = find_last_layer(graph, prediction)
        _refuse_shared(layer, 0)
    except ModelError:
        return False
    return True


def _values(graph: ir.Graph) -> list[ir.Value]:
    return [value for node in graph for value in node.outputs]


def _linear(node: ir.Node) -> tuple[int, int | None] | None:
    """Of a node that is a linear layer: the weight's axis of outputs, and the input with the bias."""
    weight = _stored(node.inputs[_WEIGHT]) if len(node.inputs) > _WEIGHT else None
    if node.domain not in ("", "ai.onnx") or weight is None:
        return None
    bias = 2 if len(node.inputs) > 2 and node.inputs[2] is not None else None
    if bias is not None and _stored(node.inputs[bias]) is None:
        return None
    if node.op_type == "Gemm":
        return 0 if integer(node, "transB", 0) else 1, bias
    if node.op_type == "MatMul" and len(weight.shape) == 2:
        return 1, None
    if node.op_type == "Conv" and integer(node, "group", 1) == 1:
        return 0, bias
    return None


def _stored(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of an initializer, of a `Constant` node, or of one that an `Identity` gives another name."""
    value = original(value)
    return None if value is None else ir.convenience.get_const_tensor(value)


def _array(value: ir.Value | None) -> np.ndarray:
    tensor = _stored(value)
    assert tensor is not None
    return np.asarray(tensor.numpy())


def _why_no_layer(prediction: str, node: ir.Node | None) -> str:
    what = "it is an input" if node is None else f"before it is {node.op_type} {shown_node(node)!r}"
    return (
        f"head.num_classes is set, but {prediction!r} is not computed by a Gemm, MatMul or Conv whose weight the file "
        f"stores, with what is done class by class after it: {what}. Set loss.prediction to the scores of the last "
        "layer, or replace the layer in the model itself."
    )


def _refuse_shared(layer: LastLayer, num_classes: int) -> None:
    node, index = layer.weight
    weight = node.inputs[index]
    assert weight is not None
    others = [use.node for use in weight.uses() if use.node is not node]
    if others:
        raise ModelError(
            f"head.num_classes is {num_classes}, but {str(weight.name)!r}, the weight of the last layer, is read by "
            f"{shown_node(others[0])!r} too. Export the model with a weight of its own for the last layer."
        )


def _own(graph: ir.Graph, node: ir.Node, index: int, taken: TakenNames) -> ir.Value:
    """An initializer that this node alone reads: exporters store equal tensors once, or as `Constant` nodes."""
    value = node.inputs[index]
    assert value is not None
    if value.is_initializer() and len(value.uses()) == 1:
        return value
    own = ir.Value(
        name=free_name(f"{value.name}_head", taken), shape=value.shape, type=value.type, const_value=_stored(value)
    )
    graph.register_initializer(own)
    node.replace_input_with(index, own)
    if not value.uses():
        remove_unread(graph, value)
        own.name = value.name
    return own


def _give(value: ir.Value, numbers: np.ndarray) -> None:
    """Other numbers, of the element type that it has, in another shape."""
    assert value.const_value is not None
    dtype = value.const_value.dtype
    value.const_value = ir.Tensor(numbers.astype(dtype.numpy()), dtype=dtype, name=value.name)
    value.shape = ir.Shape(numbers.shape)


def _resize(layer: LastLayer, num_classes: int) -> None:
    """The known shapes after the layer; one with several axes that may be that of the classes is forgotten."""
    seen, rest = set[ir.Value](), list(layer.weight[0].outputs)
    while rest:
        value = rest.pop()
        if value in seen:
            continue
        seen.add(value)
        axes = [axis for axis, size in enumerate(value.shape or ()) if size == layer.num_classes]
        if value.shape is not None and axes:
            sizes = [num_classes if axis == axes[-1] else size for axis, size in enumerate(value.shape)]
            value.shape = ir.Shape(sizes) if len(axes) == 1 or value.is_graph_output() else None
        rest += [output for use in value.uses() for output in use.node.outputs]


__all__ = ["LastLayer", "NewHead", "find_last_layer", "has_head", "replace_head", "with_new_head"]
