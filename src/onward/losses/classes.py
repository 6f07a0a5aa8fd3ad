"""What losses of classes share: logits as rows with the classes on axis 1, their cross entropy, and labels hit.

From opset 12 on, cross entropy is the standard's `SoftmaxCrossEntropyLoss`; before, it is written in operators that
opset 7 has. Classes on the last axis are seen as rows `[N, C]` by a reshape, which costs nothing; no data move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from onward.errors import ModelError

if TYPE_CHECKING:
    import onnx_ir as ir

    from onward.graph.losses.writer import LossWriter

_AFTER_SIGMOID = "For multi-label data set loss.type: binary_cross_entropy; for one class per sample set"


@dataclass(frozen=True)
class Rows:
    """Logits with the classes on axis 1: `[N, C]` if `flat`, else `[N, C, d1, ...]`; `classes` is C where known."""

    logits: ir.Value
    classes: int | None
    flat: bool


def known_size(value: ir.Value, axis: int) -> int | None:
    """The size of an axis where the model fixes it."""
    if value.shape is None:
        return None
    size = value.shape[axis]
    return size if isinstance(size, int) else None


def describe_shape(value: ir.Value) -> str:
    """`[batch, 10]`, or what is known of it."""
    if value.shape is None:
        return "of unknown rank"
    sizes = (str(d if isinstance(d, int) else d.value if d.value is not None else "?") for d in value.shape)
    return f"[{', '.join(sizes)}]"


def logits_before(writer: LossWriter, prediction: ir.Value, axis: int) -> ir.Value:
    """What a softmax cross entropy over an axis is computed from."""
    return writer.before_softmax(prediction, axis, "softmax_cross_entropy", _AFTER_SIGMOID)


def class_rows(writer: LossWriter, logits: ir.Value, class_axis: int, flat_before_opset: int = 12) -> Rows:
    """Brings the classes of `logits` to axis 1, by a view wherever one will do.

    `class_axis` counts from the front, or is -1 for the last axis of logits of unknown rank. Classes that are on
    axis 1 of more than two stay there from opset `flat_before_opset` on, where operators can take that.
    """
    classes = known_size(logits, class_axis)
    rank = None if logits.shape is None else len(logits.shape)
    if class_axis == 1 and (rank == 2 or writer.opset >= flat_before_opset):
        return Rows(logits, classes, flat=rank == 2)
    last = -1 if rank is None else rank - 1
    if rank is not None and class_axis != last:
        order = [axis for axis in range(rank) if axis != class_axis]
        logits = writer.apply("Transpose", logits, perm=[*order, class_axis], name="classes_last")
    if classes is not None:
        return Rows(writer.reshape(logits, [-1, classes], name="rows"), classes, flat=True)
    shape = writer.apply("Shape", logits)
    count = writer.apply("Gather", shape, writer.constant([last], "axis"), axis=0, name="class_count")
    sizes = writer.apply("Concat", writer.constant([-1], "all_rows"), count, axis=0, name="rows_sizes")
    return Rows(writer.reshape(logits, sizes, name="rows"), None, flat=True)


def label_rows(writer: LossWriter, labels: ir.Value, rows: Rows) -> ir.Value:
    """Labels, one for each row of logits; how many classes they have is noted."""
    if rows.classes is not None:
        writer.classes[str(labels.name)] = rows.classes
    labels = writer.as_indices(labels)
    return writer.reshape(labels, [-1], name="label_rows") if rows.flat else labels


def cross_entropy(
    writer: LossWriter, rows: Rows, labels: ir.Value, ignore_index: int | None, is_weighted: bool = False
) -> ir.Value:
    """Softmax cross entropy of integer labels, rank 0, with the meaning of ONNX's `SoftmaxCrossEntropyLoss`.

    The mean is over the labels that are not ignored, each counted with the weight of its class.
    """
    weights = writer.class_weights() if is_weighted else None
    if writer.opset < 12:
        return _cross_entropy_in_primitives(writer, rows, labels, ignore_index, weights)
    attributes: dict[str, int | str] = {"reduction": writer.spec.reduction}
    if ignore_index is not None:
        attributes["ignore_index"] = ignore_index
    inputs = [rows.logits, labels] if weights is None else [rows.logits, labels, weights]
    return writer.apply("SoftmaxCrossEntropyLoss", *inputs, name="cross_entropy", **attributes)


def _cross_entropy_in_primitives(
    writer: LossWriter, rows: Rows, labels: ir.Value, ignore_index: int | None, weights: ir.Value | None
) -> ir.Value:
    """Opset 7 to 11: the logarithm at the label is picked by a product with its one-hot row.

    A label out of range has an empty one-hot row; dividing by the row's sum makes its loss NaN instead of 0.
    """
    log_probabilities = writer.apply("LogSoftmax", rows.logits, axis=1)
    classes = count_up(writer, rows.logits, 1, rows.classes, "classes")
    hit = writer.apply("Equal", writer.unsqueeze(labels, 1), classes, name="at_label")
    one_hot = writer.floats(hit)
    picked = writer.sum_over(writer.apply("Mul", one_hot, log_probabilities), 1, name="picked")
    in_range = writer.sum_over(one_hot, 1, name="in_range")
    counted = None
    if ignore_index is not None:
        ignored = writer.apply("Equal", labels, writer.constant(ignore_index, "ignore_index"), name="ignored")
        in_range = writer.apply("Add", in_range, writer.floats(ignored))
        counted = writer.floats(writer.apply("Not", ignored))
    picked = writer.apply("Div", picked, in_range, name="picked_in_range")
    if weights is not None:
        of_label = writer.sum_over(writer.apply("Mul", one_hot, weights), 1, name="label_weights")
        counted = of_label if counted is None else writer.apply("Mul", counted, of_label)
    if counted is not None:
        picked = writer.apply("Mul", picked, counted)
    if writer.spec.reduction == "sum" or counted is None:
        return writer.apply("Neg", writer.reduced(picked), name="cross_entropy")
    total = writer.apply("Neg", writer.reduce_all(picked, "sum"))
    return writer.apply("Div", total, writer.reduce_all(counted, "sum"), name="cross_entropy")


def count_up(writer: LossWriter, value: ir.Value, axis: int, size: int | None, name: str) -> ir.Value:
    """The int64 vector 0, 1, ... as long as an axis of `value`.

    Raises:
        ModelError: the model leaves the size open and its opset has no `Range`.
    """
    if size is not None:
        return writer.constant(range(size), name)
    if writer.opset < 11:
        raise ModelError(
            f"the loss of a model of opset {writer.opset} needs to know the size of axis {axis} of {value.name!r}, "
            "which is symbolic; set it in mapped_dimensions, or convert the model to opset 12 or newer."
        )
    end = writer.squeeze(writer.size_of(value, axis), 0)
    return writer.apply("Range", writer.constant(0, "first"), end, writer.constant(1, "step"), name=name)


def count_correct(writer: LossWriter, rows: Rows, labels: ir.Value, ignore_index: int | None) -> tuple[ir.Value, ...]:
    """How many labels the largest logit hits, and how many count at all; both int64 of rank 0; if they are wanted."""
    if not writer.count_correct:
        return ()
    guess = writer.apply("ArgMax", rows.logits, axis=1, keepdims=0)
    hit = writer.apply("Equal", guess, labels)
    if ignore_index is None:
        counted = writer.apply("Equal", labels, labels, name="every_label")
    else:
        ignored = writer.apply("Equal", labels, writer.constant(ignore_index, "ignore_index"))
        counted = writer.apply("Not", ignored)
        hit = writer.apply("And", hit, counted)
    return writer.count(hit, "correct"), writer.count(counted, "counted")
