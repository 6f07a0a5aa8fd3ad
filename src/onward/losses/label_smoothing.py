"""Label smoothing of a softmax cross entropy: a share of each label is spread evenly over all classes.

The formula is torch's: `(1 - epsilon) * cross entropy + epsilon / C * sum over the C classes of -log p`, ignored labels
and class weights included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onward.losses.classes import Rows

if TYPE_CHECKING:
    import onnx_ir as ir

    from onward.graph.losses.writer import LossWriter


def smoothed(
    writer: LossWriter, cross_entropy: ir.Value, rows: Rows, labels: ir.Value, ignore_index: int | None
) -> ir.Value:
    """A cross entropy of rank 0 with its labels smoothed by `loss.label_smoothing`."""
    epsilon = writer.spec.label_smoothing
    if not epsilon:
        return cross_entropy
    labels = writer.integers(labels)
    log_probabilities = writer.apply("LogSoftmax", rows.logits, axis=1)
    weights = writer.class_weights(trailing_axes=0 if rows.flat else len(rows.logits.shape or ()) - 2)
    counted = None
    if ignore_index is not None:
        counted = writer.apply("Not", writer.apply("Equal", labels, writer.constant(ignore_index, "ignore_index")))
    if weights is not None:
        log_probabilities = writer.apply("Mul", log_probabilities, weights)
    uniform = writer.sum_over(log_probabilities, 1, name="over_classes")
    share = weights_of_labels(writer, labels, counted, weights)
    if counted is not None:
        uniform = writer.apply("Mul", uniform, writer.floats(counted))
    if writer.spec.reduction == "sum" or share is None:
        total = writer.reduced(uniform)
    else:
        total = writer.apply("Div", writer.reduce_all(uniform, "sum"), writer.reduce_all(share, "sum"))
    spread = writer.apply("Mul", total, _share_of_class(writer, rows, epsilon), name="spread")
    kept = writer.apply("Mul", cross_entropy, writer.number(1 - epsilon, "kept_share"))
    return writer.apply("Sub", kept, spread, name="smoothed")


def smoothed_targets(writer: LossWriter, targets: ir.Value, rows: Rows) -> ir.Value:
    """Dense labels smoothed by `loss.label_smoothing`."""
    epsilon = writer.spec.label_smoothing
    if not epsilon:
        return targets
    kept = writer.apply("Mul", targets, writer.number(1 - epsilon, "kept_share"))
    return writer.apply("Add", kept, _share_of_class(writer, rows, epsilon), name="smoothed")


def _share_of_class(writer: LossWriter, rows: Rows, epsilon: float) -> ir.Value:
    """`epsilon / C`."""
    if rows.classes is not None:
        return writer.number(epsilon / rows.classes, "share_of_class")
    classes = writer.floats(writer.squeeze(writer.size_of(rows.logits, 1), 0))
    return writer.apply("Div", writer.number(epsilon, "epsilon"), classes, name="share_of_class")


def weights_of_labels(
    writer: LossWriter, labels: ir.Value, counted: ir.Value | None, weights: ir.Value | None
) -> ir.Value | None:
    """What each label weighs in a mean; None: all the same."""
    if weights is None:
        return None if counted is None else writer.floats(counted)
    if counted is None:
        return writer.apply("Gather", writer.class_weights(), labels, axis=0, name="label_weights")
    # An ignored label may be no class: class 0 instead, which then weighs nothing.
    classes = writer.apply("Mul", labels, writer.integers(counted))
    found = writer.apply("Gather", writer.class_weights(), classes, axis=0, name="label_weights")
    return writer.apply("Mul", found, writer.floats(counted))
