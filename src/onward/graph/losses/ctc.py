"""The CTC loss as nodes: one operator of onward's own for the loss and one for decoding, since ONNX has neither."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.losses import terms
from onward.graph.losses.values import Dimension, describe_shape
from onward.graph.nodes.node_writer import Attribute, NodeWriter

DOMAIN = "onward.fused"
DEFAULT_BLANK = 0
DEFAULT_PADDING = -1


@dataclass(frozen=True)
class Axes:
    """Which axis of a prediction is which; counted from the front."""

    batch: int
    time: int
    classes: int


def find_axes(writer: NodeWriter, prediction: ir.Value, class_axis: int, time_axis: int | None) -> Axes:
    """The axes of a prediction of three.

    Without `time_axis`, of the two axes that are not the classes the batch is the one with the size, or the name of
    the size, that the model's inputs have first; if both or neither are, it is the first.

    Raises:
        ModelError: the prediction has not three axes, or an axis is out of range or named twice.
    """
    shape = prediction.shape
    if shape is not None and len(shape) != 3:
        raise ModelError(
            f"loss.prediction: {prediction.name!r} is {describe_shape(prediction)}; the CTC loss expects three axes, "
            "as [batch, time, classes]. Name an output, or a value in the model, that has them."
        )
    for field, axis in (("class_axis", class_axis), ("time_axis", time_axis)):
        if axis is not None and not -3 <= axis < 3:
            raise ModelError(
                f"loss.{field} is {axis}, but {prediction.name!r} has three axes for the CTC loss; expected -3 to 2."
            )
    classes = class_axis % 3
    first, second = (axis for axis in range(3) if axis != classes)
    if time_axis is not None:
        if time_axis % 3 == classes:
            raise ModelError(f"loss.time_axis and loss.class_axis are both axis {classes}; give two different axes.")
        return Axes(3 - classes - time_axis % 3, time_axis % 3, classes)
    batches = {_size(value.shape[0]) for value in writer.graph.inputs if not value.is_initializer() and value.shape} - {
        None
    }
    is_batch = [shape is not None and _size(shape[axis]) in batches for axis in (first, second)]
    return Axes(second, first, classes) if is_batch == [False, True] else Axes(first, second, classes)


def check_blank(prediction: ir.Value, axes: Axes, blank: int | None) -> None:
    """Checks that the blank is a class, where the model fixes how many there are.

    Raises:
        ModelError: it is none.
    """
    classes = terms.known_size(prediction, axes.classes)
    if blank is not None and (blank < 0 or (classes is not None and blank >= classes)):
        expected = "0 or more" if classes is None else f"0 to {classes - 1}"
        raise ModelError(
            f"loss.blank is {blank}, but {prediction.name!r} {describe_shape(prediction)} has {classes or 'its'} "
            f"classes on axis {axes.classes}; expected {expected}."
        )


def _size(size: Dimension) -> int | str | None:
    return size.value if isinstance(size, ir.SymbolicDim) else size


def add_ctc(
    writer: NodeWriter,
    logits: ir.Value,
    labels: ir.Value,
    lengths: ir.Value | None,
    axes: Axes,
    *,
    blank: int | None,
    ignore_index: int | None,
    reduction: str,
    zero_infinity: bool,
    count_correct: bool,
) -> tuple[ir.Value, tuple[ir.Value, ...]]:
    """The loss, and how many samples are decoded without a mistake of how many; all of rank 0."""
    given: dict[str, Attribute] = {
        "blank": DEFAULT_BLANK if blank is None else blank,
        "ignore_index": DEFAULT_PADDING if ignore_index is None else ignore_index,
        "class_axis": axes.classes,
        "time_axis": axes.time,
    }
    inputs = [logits, labels] if lengths is None else [logits, labels, lengths]
    loss = writer.apply_own(
        DOMAIN, "CTCLoss", *inputs, name="ctc", reduction=reduction, zero_infinity=int(zero_infinity), **given
    )
    if not count_correct:
        return loss, ()
    correct = writer.apply_own(DOMAIN, "CTCGreedyMatches", *inputs, name="correct", **given)
    count = writer.apply("Shape", labels)
    counted = writer.squeeze(writer.apply("Gather", count, writer.constant([0], "axis"), axis=0), 0)
    counted.name = writer.unique(f"{writer.prefix}counted")
    return loss, (correct, counted)
