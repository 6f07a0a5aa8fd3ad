"""Dice losses, which compare regions: one minus the overlap of prediction and label by their mean size.

`dice` is of classes that exclude each other, `binary_dice` of labels of 0 and 1. Each sample has its own
overlap, or one for each channel.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from onward.errors import ModelError
from onward.losses.binary_cross_entropy import count_correct_of_binary
from onward.losses.classes import class_rows, count_correct, count_up, describe_shape, known_size, label_rows
from onward.losses.kind import LossKind

if TYPE_CHECKING:
    import onnx_ir as ir

    from onward.graph.losses.spec import LossNames
    from onward.graph.losses.writer import LossWriter


def _add(writer: LossWriter) -> LossNames:
    prediction = writer.prediction()
    axis = writer.class_axis(prediction)
    if prediction.shape is None or len(prediction.shape) < 3:
        raise ModelError(
            f"loss.prediction: {prediction.name!r} is {describe_shape(prediction)}; loss.type 'dice' compares regions, "
            "so it expects the batch, the classes and at least one further axis, as [batch, classes, height, width]. "
            "Set loss.type: softmax_cross_entropy for one class per sample."
        )
    logits = writer.before_softmax(
        prediction, axis, "dice", "For multi-label data set loss.type: binary_dice; else set"
    )
    writer.compute_like(logits)
    shape, last = list(prediction.shape), len(prediction.shape) - 1
    labels = writer.class_labels("label", [size for i, size in enumerate(shape) if i != axis])
    values = writer.computed(logits)
    moved = values
    if axis != last:
        moved = writer.apply("Transpose", values, perm=[*(i for i in range(last + 1) if i != axis), axis])
    probabilities = writer.apply("Softmax", moved, axis=last, name="probabilities")
    classes = count_up(writer, values, axis, known_size(logits, axis), "classes")
    of_pixels = writer.unsqueeze(writer.integers(labels), last)
    hits = writer.floats(writer.apply("Equal", of_pixels, classes, name="at_label"))
    if writer.spec.ignore_index is not None:
        ignored = writer.apply("Equal", of_pixels, writer.constant(writer.spec.ignore_index, "ignore_index"))
        counted = writer.floats(writer.apply("Not", ignored))
        probabilities, hits = writer.apply("Mul", probabilities, counted), writer.apply("Mul", hits, counted)
    overlaps = _one_minus_overlap(writer, probabilities, hits, range(1, last))
    loss = writer.reduced(_foreground(writer, overlaps, known_size(logits, axis)), "dice")
    rows = class_rows(writer, values, axis)
    counts = count_correct(writer, rows, label_rows(writer, labels, rows), writer.spec.ignore_index)
    return writer.finish(loss, counts=counts)


def _add_binary(writer: LossWriter) -> LossNames:
    source = writer.before_sigmoid(writer.prediction())
    prediction, labels = writer.compared(source.value)
    probabilities = writer.apply("Sigmoid", prediction) if source.from_logits else prediction
    per_channel = writer.spec.dice_per_channel
    if per_channel and (prediction.shape is None or len(prediction.shape) < 3):
        raise ModelError(
            f"loss.dice_per_channel is true, but {writer.spec.prediction!r} is {describe_shape(prediction)}; expected "
            "the batch, the channels and at least one further axis, as [batch, channels, height, width]. Remove it."
        )
    kept = [0, 0] if per_channel else [0]
    regions = [writer.reshape(value, [*kept, -1], name="regions") for value in (probabilities, labels)]
    overlaps = _one_minus_overlap(writer, regions[0], regions[1], [len(kept)])
    loss = writer.reduced(_foreground(writer, overlaps, known_size(prediction, 1) if per_channel else None), "dice")
    counts: tuple[ir.Value, ...] = ()
    if writer.count_correct:
        counts = count_correct_of_binary(writer, prediction, labels, source.from_logits)
    return writer.finish(loss, counts=counts)


def _foreground(writer: LossWriter, overlaps: ir.Value, count: int | None) -> ir.Value:
    """What counts of [batch, classes]: all, or all but class 0."""
    if writer.spec.dice_background:
        return overlaps
    if count is None or count < 2:
        raise ModelError(
            f"loss.dice_background is false, which leaves class 0 out, but the prediction has {count or 'unknown'} "
            "classes; expected 2 or more, fixed by the model. Remove it, or for binary_dice set loss.dice_per_channel."
        )
    return writer.apply("Gather", overlaps, writer.constant(range(1, count), "foreground"), axis=1)


def _one_minus_overlap(writer: LossWriter, first: ir.Value, second: ir.Value, axes: Iterable[int]) -> ir.Value:
    """`1 - (2 sum(p t) + s) / (sum(p) + sum(t) + s)`, the sums over some axes."""
    order = sorted(axes, reverse=True)

    def total(value: ir.Value) -> ir.Value:
        for axis in order:
            value = writer.sum_over(value, axis)
        return value

    smoothing = writer.number(writer.spec.dice_smoothing, "dice_smoothing")
    both = total(writer.apply("Mul", first, second))
    above = writer.apply("Add", writer.apply("Add", both, both), smoothing)
    below = writer.apply("Add", writer.apply("Add", total(first), total(second)), smoothing)
    return writer.apply("Sub", writer.number(1.0, "one"), writer.apply("Div", above, below, name="overlap"))


DICE = LossKind(
    name="dice",
    add=_add,
    remark="overlap of regions, of classes that exclude each other",
    reads=("ignore_index", "dice_smoothing", "dice_background"),
    task="multiclass",
)
BINARY_DICE = LossKind(
    name="binary_dice",
    add=_add_binary,
    remark="overlap of regions, of labels of 0 and 1",
    reads=("from_logits", "dice_smoothing", "dice_background", "dice_per_channel"),
    task="binary",
)
