"""The focal loss (Lin et al., 2017), binary and of classes: a cross entropy in which easy labels count less."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onward.losses.binary_cross_entropy import cost_of_binary, count_correct_of_binary
from onward.losses.classes import class_rows, count_correct, count_up, label_rows, logits_before
from onward.losses.kind import LossKind
from onward.losses.label_smoothing import weights_of_labels
from onward.losses.softmax_cross_entropy import SOFTMAX_CROSS_ENTROPY

if TYPE_CHECKING:
    import onnx_ir as ir

    from onward.graph.losses.spec import LossNames
    from onward.graph.losses.writer import LossWriter


def _add(writer: LossWriter) -> LossNames:
    source = writer.before_sigmoid(writer.prediction())
    prediction, labels = writer.compared(source.value)
    cost = cost_of_binary(writer, prediction, labels, source.from_logits)
    cost = writer.apply("Mul", cost, _focus(writer, prediction, labels, source.from_logits))
    if writer.spec.focal_alpha is not None:
        cost = writer.apply("Mul", cost, _between(writer, labels, 1 - writer.spec.focal_alpha, writer.spec.focal_alpha))
    counts: tuple[ir.Value, ...] = ()
    if writer.count_correct:
        counts = count_correct_of_binary(writer, prediction, labels, source.from_logits)
    return writer.finish(writer.reduced(cost, "focal"), counts=counts)


_NEVER = 99


def _add_softmax(writer: LossWriter) -> LossNames:
    """`-(1 - p)^gamma log(p)` of the probability p of each label; a mean as that of the softmax cross entropy."""
    spec, prediction = writer.spec, writer.prediction()
    axis = writer.class_axis(prediction)
    writer.check_class_weights(prediction, axis)
    logits = logits_before(writer, prediction, axis)
    writer.compute_like(logits)
    shape = None if logits.shape is None else [d for i, d in enumerate(logits.shape) if i != axis]
    labels = writer.class_labels("label", shape)
    rows = class_rows(writer, writer.computed(logits), axis, flat_before_opset=_NEVER)
    flat = writer.integers(label_rows(writer, labels, rows))
    classes = count_up(writer, rows.logits, 1, rows.classes, "classes")
    hits = writer.floats(writer.apply("Equal", writer.unsqueeze(flat, 1), classes, name="at_label"))
    misses = writer.apply("Sub", writer.number(1.0, "one"), hits)
    found = writer.sum_over(writer.apply("Mul", hits, writer.apply("LogSoftmax", rows.logits, axis=1)), 1)
    missed = writer.sum_over(writer.apply("Mul", misses, writer.apply("Softmax", rows.logits, axis=1)), 1)
    focus = writer.apply("Pow", writer.clip_to_positive(missed), writer.number(spec.focal_gamma, "gamma"), name="focus")
    cost = writer.apply("Neg", writer.apply("Mul", found, focus))
    counted = None
    if spec.ignore_index is not None:
        counted = writer.apply("Not", writer.apply("Equal", flat, writer.constant(spec.ignore_index, "ignore_index")))
    share = weights_of_labels(writer, flat, counted, writer.class_weights())
    cost = cost if share is None else writer.apply("Mul", cost, share)
    if share is None or spec.reduction == "sum":
        loss = writer.reduced(cost, "focal")
    else:
        loss = writer.apply("Div", writer.reduce_all(cost, "sum"), writer.reduce_all(share, "sum"), name="focal")
    return writer.finish(loss, counts=count_correct(writer, rows, flat, spec.ignore_index))


def _focus(writer: LossWriter, prediction: ir.Value, labels: ir.Value, from_logits: bool) -> ir.Value:
    """`(1 - p_t) ^ gamma`, where p_t is the probability of the label.

    1 - p_t is the sum of two products of probabilities, no difference from 1, so that it keeps its digits where it is
    small; and it is kept above 0, where the gradient of a power below 1 would be infinite.
    """
    one = writer.number(1.0, "one")
    if from_logits:
        true, false = writer.apply("Sigmoid", prediction), writer.apply("Sigmoid", writer.apply("Neg", prediction))
    else:
        true, false = prediction, writer.apply("Sub", one, prediction)
    when_true = writer.apply("Mul", labels, false)
    when_false = writer.apply("Mul", writer.apply("Sub", one, labels), true)
    missed = writer.clip_to_positive(writer.apply("Add", when_true, when_false))
    return writer.apply("Pow", missed, writer.number(writer.spec.focal_gamma, "gamma"), name="focus")


def _between(writer: LossWriter, labels: ir.Value, at_zero: float, at_one: float) -> ir.Value:
    """A weight for each label: `at_zero` at 0, `at_one` at 1, and linearly between."""
    slope = writer.apply("Mul", labels, writer.number(at_one - at_zero, "slope"))
    return writer.apply("Add", slope, writer.number(at_zero, "weight_of_zero"), name="label_weights")


FOCAL = LossKind(
    name="focal",
    add=_add,
    remark="binary cross entropy in which well-classified elements count less",
    reads=("from_logits", "focal_gamma", "focal_alpha"),
    task="binary",
)
SOFTMAX_FOCAL = LossKind(
    name="softmax_focal",
    add=_add_softmax,
    remark="softmax cross entropy in which well-classified labels count less",
    reads=("ignore_index", "class_weights", "focal_gamma"),
    normalizer=SOFTMAX_CROSS_ENTROPY.normalizer,
    task="multiclass",
)
