"""The mean squared error: `(prediction - label)^2`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onward.losses.kind import LossKind

if TYPE_CHECKING:
    from onward.graph.losses.spec import LossNames
    from onward.graph.losses.writer import LossWriter


def _add(writer: LossWriter) -> LossNames:
    prediction, labels = writer.compared(writer.prediction())
    difference = writer.apply("Sub", prediction, labels)
    square = writer.apply("Mul", difference, difference, name="square")
    return writer.finish(writer.reduced(square, "squared_error"))


MEAN_SQUARED_ERROR = LossKind(name="mean_squared_error", add=_add, short_name="mse")
