"""The binary cross entropy: labels of 0 and 1 against probabilities or, stably, logits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from onward.losses.kind import LossKind

if TYPE_CHECKING:
    import onnx_ir as ir

    from onward.graph.losses.spec import LossNames
    from onward.graph.losses.writer import LossWriter

_LOG_FLOOR = -100.0
"""Where torch cuts the logarithms of a binary cross entropy, so that probability 0 costs 100 and not infinity."""


def _add(writer: LossWriter) -> LossNames:
    source = writer.before_sigmoid(writer.prediction())
    prediction, labels = writer.compared(source.value)
    loss = writer.reduced(cost_of_binary(writer, prediction, labels, source.from_logits), "binary_cross_entropy")
    counts = count_correct_of_binary(writer, prediction, labels, source.from_logits) if writer.count_correct else ()
    return writer.finish(loss, counts=counts)


def cost_of_binary(writer: LossWriter, prediction: ir.Value, labels: ir.Value, from_logits: bool) -> ir.Value:
    """`-(y log p + (1 - y) log(1 - p))`, on probabilities or, stably, on logits.

    On logits x it is `y softplus(-x) + (1 - y) softplus(x)`: no difference of large numbers, and the right gradient
    at x = 0 too, which the usual form with max(x, 0) and |x| has not.
    """
    one = writer.number(1.0, "one")
    against = writer.apply("Sub", one, labels, name="one_minus_label")
    if from_logits:
        when_true = writer.apply("Softplus", writer.apply("Neg", prediction))
        when_false = writer.apply("Softplus", prediction)
    else:
        when_true = _minus_log(writer, prediction)
        when_false = _minus_log(writer, writer.apply("Sub", one, prediction, name="one_minus_prediction"))
    return writer.apply(
        "Add", writer.apply("Mul", labels, when_true), writer.apply("Mul", against, when_false), name="cost"
    )


def _minus_log(writer: LossWriter, probability: ir.Value) -> ir.Value:
    """`-log(p)`, 100 at p = 0 as in torch, with gradient 0 there instead of NaN."""
    minus_log = writer.apply("Neg", writer.apply("Log", writer.clip_to_positive(probability)))
    smallest = writer.number(writer.smallest, "smallest")
    vanished = writer.floats(writer.apply("Less", probability, smallest))
    rest = writer.number(-_LOG_FLOOR + math.log(writer.smallest), "rest_to_floor")
    return writer.apply("Add", minus_log, writer.apply("Mul", vanished, rest))


def count_correct_of_binary(
    writer: LossWriter, prediction: ir.Value, labels: ir.Value, from_logits: bool
) -> tuple[ir.Value, ir.Value]:
    """How many labels of 0 and 1 are on their side of one half, and how many there are; both int64 of rank 0."""
    zero, half = writer.number(0.0, "false"), writer.number(0.5, "half")
    guess = writer.apply("Greater", prediction, zero if from_logits else half)
    right = writer.apply("Equal", guess, writer.apply("Greater", labels, half))
    # 0 exactly for labels of 0 and 1; before opset 11, floats cannot be compared for equality.
    between = writer.apply("Mul", labels, writer.apply("Sub", writer.number(1.0, "true"), labels))
    counted = writer.apply("Not", writer.apply("Greater", writer.apply("Abs", between), zero))
    hit = writer.apply("And", right, counted)
    return writer.count(hit, "correct"), writer.count(counted, "counted")


BINARY_CROSS_ENTROPY = LossKind(
    name="binary_cross_entropy",
    add=_add,
    short_name="bce",
    reads=("from_logits",),
    task="binary",
)
