"""Losses written as ONNX nodes: cross entropy, squared and absolute error, binary cross entropy.

From opset 12 on, cross entropy is the standard's `SoftmaxCrossEntropyLoss`; before, it is written in operators that
opset 7 has. Classes on the last axis are seen as rows `[N, C]` by a reshape, which costs nothing; no data move.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.nodes.node_writer import NodeWriter

INTEGER_TYPES = frozenset(
    {
        ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32, ir.DataType.INT64,
        ir.DataType.UINT8, ir.DataType.UINT16, ir.DataType.UINT32, ir.DataType.UINT64,
    }
)  # fmt: skip
FLOAT_TYPES = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})

_SMALLEST = float(np.finfo(np.float32).tiny)
"""Smallest normal float32: its inverse is finite, so that the gradient of its logarithm is no infinity."""

_LOG_FLOOR = -100.0
"""Where torch cuts the logarithms of a binary cross entropy, so that probability 0 costs 100 and not infinity."""


@dataclass(frozen=True)
class Rows:
    """Logits with the classes on axis 1: `[N, C]` if `flat`, else `[N, C, d1, ...]`; `classes` is C where known."""

    logits: ir.Value
    classes: int | None
    flat: bool


def computing_type(value: ir.Value) -> ir.DataType:
    """The type a loss is computed in: float32, or float64 for float64 predictions."""
    return ir.DataType.DOUBLE if value.dtype is ir.DataType.DOUBLE else ir.DataType.FLOAT


def to_computing_type(writer: NodeWriter, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """The value cast to `dtype`; integers only where they are of another type.

    A float is cast even if the model says that it has the type: in mixed precision it is computed in 16 bits.
    """
    if value.dtype is dtype and dtype not in FLOAT_TYPES:
        return value
    cast = writer.cast(value, dtype)
    cast.dtype = dtype
    cast.shape = value.shape
    return cast


def known_size(value: ir.Value, axis: int) -> int | None:
    """The size of an axis where the model fixes it."""
    if value.shape is None:
        return None
    size = value.shape[axis]
    return size if isinstance(size, int) else None


def class_rows(writer: NodeWriter, logits: ir.Value, class_axis: int, flat_before_opset: int = 12) -> Rows:
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


def cross_entropy(
    writer: NodeWriter,
    rows: Rows,
    labels: ir.Value,
    *,
    ignore_index: int | None,
    class_weights: Sequence[float] | None,
    reduction: str,
    dtype: ir.DataType,
) -> ir.Value:
    """Softmax cross entropy of integer labels, rank 0, with the meaning of ONNX's `SoftmaxCrossEntropyLoss`.

    The mean is over the labels that are not ignored, each counted with the weight of its class.
    """
    weights = None
    if class_weights is not None:
        weights = writer.constant(class_weights, "class_weights", dtype.numpy())
    if writer.opset >= 12:
        attributes: dict[str, int | str] = {"reduction": reduction}
        if ignore_index is not None:
            attributes["ignore_index"] = ignore_index
        inputs = [rows.logits, labels] if weights is None else [rows.logits, labels, weights]
        return writer.apply("SoftmaxCrossEntropyLoss", *inputs, name="cross_entropy", **attributes)
    return _cross_entropy_in_primitives(writer, rows, labels, ignore_index, weights, reduction, dtype)


def _cross_entropy_in_primitives(
    writer: NodeWriter,
    rows: Rows,
    labels: ir.Value,
    ignore_index: int | None,
    weights: ir.Value | None,
    reduction: str,
    dtype: ir.DataType,
) -> ir.Value:
    """Opset 7 to 11: the logarithm at the label is picked by a product with its one-hot row.

    A label out of range has an empty one-hot row; dividing by the row's sum makes its loss NaN instead of 0.
    """
    log_probabilities = writer.apply("LogSoftmax", rows.logits, axis=1)
    classes = count_up(writer, rows.logits, 1, rows.classes, "classes")
    hit = writer.apply("Equal", writer.unsqueeze(labels, 1), classes, name="at_label")
    one_hot = writer.cast(hit, dtype)
    picked = writer.sum_over(writer.apply("Mul", one_hot, log_probabilities), 1, name="picked")
    in_range = writer.sum_over(one_hot, 1, name="in_range")
    counted = None
    if ignore_index is not None:
        ignored = writer.apply("Equal", labels, writer.constant(ignore_index, "ignore_index"), name="ignored")
        in_range = writer.apply("Add", in_range, writer.cast(ignored, dtype))
        counted = writer.cast(writer.apply("Not", ignored), dtype)
    picked = writer.apply("Div", picked, in_range, name="picked_in_range")
    if weights is not None:
        of_label = writer.sum_over(writer.apply("Mul", one_hot, weights), 1, name="label_weights")
        counted = of_label if counted is None else writer.apply("Mul", counted, of_label)
    if counted is not None:
        picked = writer.apply("Mul", picked, counted)
    if reduction == "sum" or counted is None:
        return writer.apply("Neg", writer.reduce_all(picked, reduction), name="cross_entropy")
    total = writer.apply("Neg", writer.reduce_all(picked, "sum"))
    return writer.apply("Div", total, writer.reduce_all(counted, "sum"), name="cross_entropy")


def count_up(writer: NodeWriter, value: ir.Value, axis: int, size: int | None, name: str) -> ir.Value:
    """The int64 vector 0, 1, ... as long as an axis of `value`.

    Raises:
        ModelError: the model leaves the size open and its opset has no `Range`.
    """
    if size is not None:
        return writer.constant(np.arange(size), name)
    if writer.opset < 11:
        raise ModelError(
            f"the loss of a model of opset {writer.opset} needs to know the size of axis {axis} of {value.name!r}, "
            "which is symbolic; set it in mapped_dimensions, or convert the model to opset 12 or newer."
        )
    end = writer.squeeze(writer.size_of(value, axis), 0)
    return writer.apply("Range", writer.constant(0, "first"), end, writer.constant(1, "step"), name=name)


def dense_cross_entropy(
    writer: NodeWriter,
    logits: ir.Value,
    labels: ir.Value,
    class_axis: int,
    class_weights: Sequence[float] | None,
    reduction: str,
    dtype: ir.DataType,
) -> ir.Value:
    """`-sum(label * log_softmax(logits))` over the classes, then the mean (or sum) over the rows."""
    # Before opset 13, LogSoftmax flattens everything from its axis on.
    rows = class_rows(writer, logits, class_axis, flat_before_opset=13)
    targets = class_rows(writer, labels, class_axis, flat_before_opset=13).logits
    log_probabilities = writer.apply("LogSoftmax", rows.logits, axis=1)
    weighed = writer.apply("Mul", targets, log_probabilities)
    if class_weights is not None:
        trailing = 0 if rows.flat else len(logits.shape or ()) - 2
        shaped = np.asarray(class_weights).reshape(-1, *[1] * trailing)
        weighed = writer.apply("Mul", weighed, writer.constant(shaped, "class_weights", dtype.numpy()))
    per_row = writer.sum_over(weighed, 1, name="per_row")
    return writer.apply("Neg", writer.reduce_all(per_row, reduction), name="cross_entropy")


def squared_error(writer: NodeWriter, prediction: ir.Value, labels: ir.Value, reduction: str) -> ir.Value:
    """Mean (or sum) over all elements of `(prediction - label)^2`."""
    difference = writer.apply("Sub", prediction, labels)
    square = writer.apply("Mul", difference, difference, name="square")
    return writer.reduce_all(square, reduction, name="squared_error")


def absolute_error(writer: NodeWriter, prediction: ir.Value, labels: ir.Value, reduction: str) -> ir.Value:
    """Mean (or sum) over all elements of `|prediction - label|`."""
    difference = writer.apply("Abs", writer.apply("Sub", prediction, labels))
    return writer.reduce_all(difference, reduction, name="absolute_error")


def binary_cross_entropy(
    writer: NodeWriter,
    prediction: ir.Value,
    labels: ir.Value,
    from_logits: bool,
    reduction: str,
    dtype: ir.DataType,
) -> ir.Value:
    """Mean (or sum) of `-(y log p + (1 - y) log(1 - p))`, on probabilities or, stably, on logits.

    On logits x it is `y softplus(-x) + (1 - y) softplus(x)`: no difference of large numbers, and the right gradient
    at x = 0 too, which the usual form with max(x, 0) and |x| has not.
    """
    one = writer.constant(1.0, "one", dtype.numpy())
    against = writer.apply("Sub", one, labels, name="one_minus_label")
    if from_logits:
        when_true = writer.apply("Softplus", writer.apply("Neg", prediction))
        when_false = writer.apply("Softplus", prediction)
    else:
        when_true = _minus_log(writer, prediction, dtype)
        when_false = _minus_log(writer, writer.apply("Sub", one, prediction, name="one_minus_prediction"), dtype)
    cost = writer.apply(
        "Add", writer.apply("Mul", labels, when_true), writer.apply("Mul", against, when_false), name="cost"
    )
    return writer.reduce_all(cost, reduction, name="binary_cross_entropy")


def _minus_log(writer: NodeWriter, probability: ir.Value, dtype: ir.DataType) -> ir.Value:
    """`-log(p)`, 100 at p = 0 as in torch, with gradient 0 there instead of NaN."""
    if writer.opset < 11:
        clipped = writer.apply("Clip", probability, min=_SMALLEST)
    else:
        clipped = writer.apply("Clip", probability, writer.constant(_SMALLEST, "smallest", dtype.numpy()))
    minus_log = writer.apply("Neg", writer.apply("Log", clipped))
    smallest = writer.constant(_SMALLEST, "smallest", dtype.numpy())
    vanished = writer.cast(writer.apply("Less", probability, smallest), dtype)
    rest = writer.constant(-_LOG_FLOOR + math.log(_SMALLEST), "rest_to_floor", dtype.numpy())
    return writer.apply("Add", minus_log, writer.apply("Mul", vanished, rest))


def gather_positions(writer: NodeWriter, values: ir.Value, positions: ir.Value) -> ir.Value:
    """Rows of `values` `[B, S, V]` at `positions` `[B, P]`, as `[B, P, V]`."""
    if writer.opset >= 12:
        return writer.apply("GatherND", values, writer.unsqueeze(positions, 2), batch_dims=1, name="at_positions")
    sequence = count_up(writer, values, 1, known_size(values, 1), "sequence")
    hit = writer.apply("Equal", writer.unsqueeze(positions, 2), sequence)
    chosen = writer.cast(hit, computing_type(values))
    return writer.apply("MatMul", chosen, values, name="at_positions")


def count_correct(
    writer: NodeWriter, rows: Rows, labels: ir.Value, ignore_index: int | None
) -> tuple[ir.Value, ir.Value]:
    """How many labels the largest logit hits, and how many count at all; both int64 of rank 0."""
    guess = writer.apply("ArgMax", rows.logits, axis=1, keepdims=0)
    hit = writer.apply("Equal", guess, labels)
    if ignore_index is None:
        counted = writer.apply("Equal", labels, labels, name="every_label")
    else:
        ignored = writer.apply("Equal", labels, writer.constant(ignore_index, "ignore_index"))
        counted = writer.apply("Not", ignored)
        hit = writer.apply("And", hit, counted)
    return (
        writer.reduce_all(writer.cast(hit, ir.DataType.INT64), "sum", name="correct"),
        writer.reduce_all(writer.cast(counted, ir.DataType.INT64), "sum", name="counted"),
    )


def count_correct_binary(
    writer: NodeWriter, values: ir.Value, labels: ir.Value, from_logits: bool
) -> tuple[ir.Value, ir.Value]:
    """How many labels of 0 and 1 are on their side of one half, and how many there are; both int64 of rank 0."""
    dtype = computing_type(values).numpy()
    zero, half = writer.constant(0.0, "false", dtype), writer.constant(0.5, "half", dtype)
    guess = writer.apply("Greater", values, zero if from_logits else half)
    right = writer.apply("Equal", guess, writer.apply("Greater", labels, half))
    # 0 exactly for labels of 0 and 1; before opset 11, floats cannot be compared for equality.
    between = writer.apply("Mul", labels, writer.apply("Sub", writer.constant(1.0, "true", dtype), labels))
    counted = writer.apply("Not", writer.apply("Greater", writer.apply("Abs", between), zero))
    hit = writer.apply("And", right, counted)
    return (
        writer.reduce_all(writer.cast(hit, ir.DataType.INT64), "sum", name="correct"),
        writer.reduce_all(writer.cast(counted, ir.DataType.INT64), "sum", name="counted"),
    )
