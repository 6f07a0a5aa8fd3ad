"""The mean absolute error: `|prediction - label|`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onward.losses.kind import LossKind

if TYPE_CHECKING:
    from onward.graph.losses.spec import LossNames
    from onward.graph.losses.writer import LossWriter


def _add(writer: LossWriter) -> LossNames:
    difference = writer.apply("Abs", writer.apply("Sub", *writer.compared(writer.prediction())))
    return writer.finish(writer.reduced(difference, "absolute_error"))


L1 = LossKind(name="l1", add=_add, short_name="mae")
