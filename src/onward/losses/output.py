"""An output of the model that is the loss already."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onward.losses.kind import LossKind

if TYPE_CHECKING:
    from onward.graph.losses.spec import LossNames
    from onward.graph.losses.writer import LossWriter


def _add(writer: LossWriter) -> LossNames:
    loss = writer.prediction()
    if writer.is_a_loss(loss):
        return writer.keep(loss)
    writer.compute_like(loss)
    return writer.finish(writer.reduced(writer.computed(loss)))


OUTPUT = LossKind(
    name="output",
    add=_add,
    remark="an output of the model is the loss already",
    required=("prediction",),
    predictions=(),
    labels=(),
)
