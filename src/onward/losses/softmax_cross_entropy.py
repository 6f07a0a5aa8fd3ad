"""The softmax cross entropy: class labels, or probabilities of classes, against logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onward.errors import ModelError
from onward.losses.classes import class_rows, count_correct, cross_entropy, label_rows, logits_before
from onward.losses.kind import LossKind
from onward.losses.label_smoothing import smoothed, smoothed_targets
from onward.losses.labels import LabelCount

if TYPE_CHECKING:
    import onnx_ir as ir

    from onward.graph.losses.spec import LossNames
    from onward.graph.losses.writer import LossWriter
    from onward.parameters import Loss


def _add(writer: LossWriter) -> LossNames:
    spec, prediction = writer.spec, writer.prediction()
    writer.required("label")
    axis = writer.class_axis(prediction)
    writer.check_class_weights(prediction, axis)
    logits = logits_before(writer, prediction, axis)
    writer.compute_like(logits)
    if spec.dense_labels:
        return _add_dense(writer, logits, axis)
    shape = None if logits.shape is None else [d for i, d in enumerate(logits.shape) if i != axis]
    labels = writer.class_labels("label", shape)
    # Before opset 13, LogSoftmax, which smoothing needs, flattens everything from its axis on.
    rows = class_rows(writer, writer.computed(logits), axis, flat_before_opset=13 if spec.label_smoothing else 12)
    flat = label_rows(writer, labels, rows)
    loss = cross_entropy(writer, rows, flat, spec.ignore_index, is_weighted=True)
    loss = smoothed(writer, loss, rows, flat, spec.ignore_index)
    return writer.finish(loss, counts=count_correct(writer, rows, flat, spec.ignore_index))


def _add_dense(writer: LossWriter, logits: ir.Value, axis: int) -> LossNames:
    """`-sum(label * log_softmax(logits))` over the classes, then the mean (or sum) over the rows."""
    if writer.spec.ignore_index is not None:
        raise ModelError("loss.ignore_index has no meaning for dense_labels, which are probabilities; remove it.")
    labels = writer.number_labels("label", logits.shape)
    values = writer.computed(logits)
    targets = writer.like(writer.computed(labels), logits)
    # Before opset 13, LogSoftmax flattens everything from its axis on.
    rows = class_rows(writer, values, axis, flat_before_opset=13)
    wanted = smoothed_targets(writer, class_rows(writer, targets, axis, flat_before_opset=13).logits, rows)
    log_probabilities = writer.apply("LogSoftmax", rows.logits, axis=1)
    weighed = writer.apply("Mul", wanted, log_probabilities)
    weights = writer.class_weights(trailing_axes=0 if rows.flat else len(logits.shape or ()) - 2)
    if weights is not None:
        weighed = writer.apply("Mul", weighed, weights)
    per_row = writer.sum_over(weighed, 1, name="per_row")
    loss = writer.apply("Neg", writer.reduced(per_row), name="cross_entropy")
    return writer.finish(loss, counts=_count_of_dense(writer, values, targets, axis) if writer.count_correct else ())


def _count_of_dense(writer: LossWriter, logits: ir.Value, targets: ir.Value, axis: int) -> tuple[ir.Value, ...]:
    best = class_rows(writer, targets, axis)
    labels = writer.apply("ArgMax", best.logits, axis=1, keepdims=0)
    return count_correct(writer, class_rows(writer, logits, axis), labels, None)


def _normalizer(loss: Loss) -> tuple[LabelCount | None, ...]:
    return (None if loss.dense_labels else LabelCount(str(loss.label), loss.ignore_index, loss.class_weights),)


SOFTMAX_CROSS_ENTROPY = LossKind(
    name="softmax_cross_entropy",
    add=_add,
    short_name="cross_entropy",
    reads=("ignore_index", "class_weights", "dense_labels", "label_smoothing"),
    normalizer=_normalizer,
    has_soft_targets=True,
    task="multiclass",
)
