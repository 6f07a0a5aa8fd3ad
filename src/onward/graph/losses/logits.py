"""The logits of a prediction: losses that apply their own softmax or sigmoid start before the model's.

Where a model ends in probabilities, the loss takes the value before its last activation, or the logarithm of the
probabilities where that value cannot be reached; the model's own outputs stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onward.graph.classical.rewriting import DOMAIN as CLASSICAL_DOMAIN
from onward.graph.losses.axes import AxisTracker
from onward.graph.losses.values import FLOAT_TYPES, clip_to_positive, computing_type, to_computing_type
from onward.graph.nodes.node_writer import NodeWriter
from onward.graph.nodes.structure import ML_DOMAIN
from onward.graph.operators import Fact, operators_with

_MOVES_ELEMENTS = operators_with(Fact.SAME_ELEMENTS) | {"Cast", "Gather", "Slice"}
"""Operators that give out elements of their first input; they are repeated on the logits."""
_LINEAR = operators_with(Fact.MATMUL | Fact.CONVOLUTION) | {"Add", "Sub", "BatchNormalization"}


@dataclass(frozen=True)
class LossInput:
    """What a loss is computed from.

    Attributes:
        value: in the shape of the prediction.
        from_logits: whether it is logits, or logarithms of probabilities, which serve as such.
        notes: what was taken instead of the prediction, for the user.
        holds_probabilities: whether the prediction itself holds probabilities.
    """

    value: ir.Value
    from_logits: bool
    notes: tuple[str, ...] = ()
    holds_probabilities: bool = False


def for_cross_entropy(
    writer: NodeWriter, prediction: ir.Value, class_axis: int, loss: str, after_sigmoid: str
) -> LossInput:
    """What a softmax cross entropy over `class_axis` is to be computed from, given the model's prediction.

    `class_axis` counts from the front, or is -1 where the rank is unknown; `loss` is its type and `after_sigmoid` the
    beginning of what to do for an output of Sigmoid, in messages.
    """
    search = _Search(writer, AxisTracker(writer.model))
    are_probabilities = search.sums_to_one(prediction, class_axis)
    found = search.before(prediction, class_axis, search.softmax_input)
    if found is not None:
        _describe_like(found, prediction)
        return LossInput(found, True, _note_of_logits(prediction, search, "softmax"), are_probabilities)
    if are_probabilities:
        note = (
            f"loss.prediction: {prediction.name!r} holds probabilities, and the logits before their softmax cannot be "
            f"used; {loss} is computed from their logarithm. The exported model is unchanged."
        )
        return LossInput(_logarithm(writer, prediction), True, (note,), True)
    return LossInput(prediction, True, _warnings_for_cross_entropy(search, prediction, class_axis, loss, after_sigmoid))


def for_binary_cross_entropy(writer: NodeWriter, prediction: ir.Value, from_logits: bool) -> LossInput:
    """What a binary cross entropy is to be computed from, given the model's prediction and `loss.from_logits`."""
    search = _Search(writer, AxisTracker(writer.model))
    are_probabilities = search.in_unit_interval(prediction) or not from_logits
    found = search.before(prediction, None, search.sigmoid_input)
    if found is not None:
        _describe_like(found, prediction)
        return LossInput(
            found, True, _note_of_logits(prediction, search, "sigmoid" if from_logits else ""), are_probabilities
        )
    if from_logits and are_probabilities:
        note = (
            f"loss.prediction: {prediction.name!r} holds probabilities already, so loss.from_logits is ignored. Set "
            "loss.from_logits: false."
        )
        return LossInput(prediction, False, (note,), are_probabilities)
    origin = search.origin(prediction)
    if not from_logits and origin is not None and origin.op_type in _LINEAR:
        note = (
            f"loss.prediction: {prediction.name!r} is the output of {origin.op_type} {origin.name!r}, which is not "
            "limited to 0 to 1, but the loss expects probabilities. Set loss.from_logits: true if they are "
            "logits."
        )
        return LossInput(prediction, False, (note,), are_probabilities)
    return LossInput(prediction, from_logits, (), are_probabilities)


def _note_of_logits(prediction: ir.Value, search: _Search, applies: str) -> tuple[str, ...]:
    activations = ", ".join(dict.fromkeys(f"{node.op_type} {node.name!r}" for node, _ in search.passed))
    befores = ", ".join(dict.fromkeys(repr(value.name) for _, value in search.passed))
    why = f"the loss applies its own {applies}" if applies else "it is more accurate"
    return (
        f"loss.prediction: {prediction.name!r} is computed by {activations}; the loss is computed from the value "
        f"before it, {befores}, because {why}. The exported model is unchanged.",
    )


def _warnings_for_cross_entropy(
    search: _Search, prediction: ir.Value, class_axis: int, loss: str, after_sigmoid: str
) -> tuple[str, ...]:
    origin = search.origin(prediction)
    if origin is None or origin.domain != "":
        return ()
    if origin.op_type == "Sigmoid":
        before = "" if origin.inputs[0] is None else origin.inputs[0].name
        return (
            f"loss.prediction: {prediction.name!r} is computed by Sigmoid {origin.name!r}, and {loss} applies a "
            f"softmax on top of it, which trains slowly. {after_sigmoid} loss.prediction: {before}.",
        )
    if origin.op_type in ("Softmax", "LogSoftmax"):
        return (
            f"loss.prediction: {prediction.name!r} is computed by {origin.op_type} {origin.name!r} over other axes "
            f"than loss.class_axis ({class_axis}). Set loss.class_axis to the axis of the classes.",
        )
    return ()


def _describe_like(value: ir.Value, prediction: ir.Value) -> None:
    """Type and shape of the prediction for a value that lacks them; both have the same."""
    if value.shape is None or len(value.shape) != len(prediction.shape or value.shape):
        value.shape = prediction.shape
    if value.dtype is None and prediction.dtype is not None:
        value.dtype = prediction.dtype


def _logarithm(writer: NodeWriter, probabilities: ir.Value) -> ir.Value:
    """Finite for a probability of 0, with gradient 0 there."""
    dtype = computing_type(probabilities)
    clipped = clip_to_positive(writer, to_computing_type(writer, probabilities, dtype), dtype)
    logarithm = writer.apply("Log", clipped, name="log_probabilities")
    logarithm.shape, logarithm.dtype = probabilities.shape, dtype
    return logarithm


Activation = Callable[[ir.Node, "int | None"], "ir.Value | None"]
"""From a node and the class axis of its output (None: any) to the value before the activation that the node is."""


class _Search:
    """Walks from a prediction back to activations.

    Attributes:
        passed: the activations found, each with the value before it.
    """

    def __init__(self, writer: NodeWriter, axes: AxisTracker) -> None:
        self.writer = writer
        self.axes = axes
        self.passed: list[tuple[ir.Node, ir.Value]] = []

    def before(self, value: ir.Value, axis: int | None, activation: Activation) -> ir.Value | None:
        """The value before the activation that ends in `value`, what moves elements after it repeated on it."""
        node = value.producer()
        if node is None or node.graph is not self.writer.graph:
            return None
        found = activation(node, axis)
        if found is not None:
            self.passed.append((node, found))
            return found
        if node.domain == "" and node.op_type in ("DequantizeLinear", "QuantizeLinear"):
            return self._before_first(node, axis, activation)
        if not self._moves_elements(node):
            return None
        axis_before = self._axis_before(node, axis)
        if axis is not None and axis_before is None:
            return None
        moved = list(node.inputs) if node.op_type == "Concat" else [node.inputs[0]]
        logits = [None if one is None else self.before(one, axis_before, activation) for one in moved]
        if any(one is None for one in logits):
            return None
        return self._repeat(node, logits, value)

    def _before_first(self, node: ir.Node, axis: int | None, activation: Activation) -> ir.Value | None:
        first = node.inputs[0]
        return None if first is None else self.before(first, axis, activation)

    def _moves_elements(self, node: ir.Node) -> bool:
        if node.domain != "" or len(node.outputs) != 1:
            return False
        if node.op_type == "Cast":
            return node.outputs[0].dtype in FLOAT_TYPES
        return node.op_type in _MOVES_ELEMENTS or node.op_type == "Concat"

    def _axis_before(self, node: ir.Node, axis: int | None) -> int | None:
        return None if axis is None else self.axes.before(node, axis)

    def _repeat(self, node: ir.Node, logits: Sequence[ir.Value | None], like: ir.Value) -> ir.Value:
        """The node again, on logits."""
        stem = f"{self.writer.prefix}logits/{node.name or node.op_type}"
        copies = [ir.Attr(one.name, one.type, one.value) for one in node.attributes.values()]
        again = self.writer.new_node(node.op_type, [*logits, *node.inputs[len(logits) :]], stem, copied=copies)
        self.writer.graph.append(again)
        output = again.outputs[0]
        output.type, output.shape = like.type, like.shape
        return output

    def softmax_input(self, node: ir.Node, axis: int | None) -> ir.Value | None:
        """What a softmax or its logarithm over the class axis is computed from, written out or not."""
        if node.domain != "":
            return None
        if node.op_type in ("Softmax", "LogSoftmax"):
            return node.inputs[0] if self.axes.is_softmax_over(node, axis) else None
        inner = None if not node.inputs or node.inputs[0] is None else node.inputs[0].producer()
        if inner is None or inner.domain != "" or inner.graph is not node.graph:
            return None
        if (node.op_type, inner.op_type) in (("Log", "Softmax"), ("Exp", "LogSoftmax")):
            return inner.inputs[0] if self.axes.is_softmax_over(inner, axis) else None
        if node.op_type == "Div" and inner.op_type == "Exp" and self.axes.divides_by_sum(node, axis):
            return inner.inputs[0]
        return None

    def sigmoid_input(self, node: ir.Node, axis: int | None) -> ir.Value | None:
        """What a sigmoid is computed from, as an operator or as `1 / (1 + exp(-x))`."""
        if node.domain != "":
            return None
        if node.op_type == "Sigmoid":
            return node.inputs[0]
        sum_ = self.axes.producer_of_reciprocal(node)
        for one, exponential in self.axes.summands(sum_):
            inner = exponential.producer()
            if not self.axes.is_constant(one, 1.0) or inner is None or inner.op_type != "Exp":
                continue
            negative = None if inner.inputs[0] is None else inner.inputs[0].producer()
            if negative is not None and negative.op_type == "Neg":
                return negative.inputs[0]
        return None

    def origin(self, value: ir.Value) -> ir.Node | None:
        """The node that computes the elements of a value, what only moves them left out."""
        node = value.producer()
        while node is not None and self._moves_elements(node) and node.inputs[0] is not None:
            node = node.inputs[0].producer()
        return node

    def sums_to_one(self, value: ir.Value | None, axis: int) -> bool:
        """Whether the elements along an axis are known to be probabilities that sum to one."""
        node = None if value is None else value.producer()
        if node is None:
            return False
        if node.domain in (ML_DOMAIN, CLASSICAL_DOMAIN):
            return self._classifier_sums_to_one(node)
        if self.softmax_input(node, axis) is not None:
            return node.op_type not in ("Log", "LogSoftmax")
        if node.op_type in ("Clip", "DequantizeLinear", "QuantizeLinear"):
            return self.sums_to_one(node.inputs[0], axis)
        if node.op_type == "If":
            place = node.outputs.index(value)
            branches = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
            return all(self.sums_to_one(branch.outputs[place], axis) for branch in branches)
        if node.op_type == "Div" and self.axes.divides_by_sum(node, axis):
            return self._is_positive(node.inputs[0])
        if node.op_type == "Mean" or self._moves_elements(node):
            before = axis if node.op_type == "Mean" else self.axes.before(node, axis)
            moved = node.inputs if node.op_type in ("Mean", "Concat") else node.inputs[:1]
            return before is not None and all(self.sums_to_one(one, before) for one in moved)
        if node.op_type == "ReduceMean":
            before = self.axes.before(node, axis)
            return before is not None and self.sums_to_one(node.inputs[0], before)
        return False

    def _classifier_sums_to_one(self, node: ir.Node) -> bool:
        post = node.attributes.get("post_transform")
        if node.op_type == "Normalizer":
            norm = node.attributes.get("norm")
            return norm is not None and norm.as_string() == "L1" and self.in_unit_interval(node.inputs[0])
        if node.op_type == "PairwiseCoupling":
            return True
        return node.op_type == "LinearClassifier" and post is not None and post.as_string() == "SOFTMAX"

    def _is_positive(self, value: ir.Value | None) -> bool:
        node = None if value is None else value.producer()
        return node is not None and node.domain == "" and node.op_type in ("Exp", "Sigmoid", "Softplus", "Softmax")

    def in_unit_interval(self, value: ir.Value | None) -> bool:
        """Whether every element is known to be a probability."""
        node = None if value is None else value.producer()
        if node is None:
            return False
        if node.op_type == "PairwiseCoupling" and node.domain == CLASSICAL_DOMAIN:
            return True
        if node.op_type == "Normalizer" and node.domain == ML_DOMAIN:
            return self._classifier_sums_to_one(node)
        if node.domain == ML_DOMAIN:
            post = node.attributes.get("post_transform")
            return post is not None and post.as_string() in ("LOGISTIC", "SOFTMAX")
        if node.op_type in ("Sigmoid", "HardSigmoid", "Softmax"):
            return True
        if node.op_type == "Clip":
            return self.axes.clips_to_unit_interval(node) or self.in_unit_interval(node.inputs[0])
        if node.op_type == "Sub":
            return self.axes.is_constant(node.inputs[0], 1.0) and self.in_unit_interval(node.inputs[1])
        if node.op_type in ("Mean", "Max", "Min", "Mul", "Concat"):
            return all(self.in_unit_interval(one) for one in node.inputs)
        averages = ("ReduceMean", "ReduceMax", "ReduceMin", "DequantizeLinear", "QuantizeLinear")
        if node.op_type in averages or self._moves_elements(node):
            return self.in_unit_interval(node.inputs[0])
        return self.softmax_input(node, None) is not None and node.op_type == "Div"
