"""A loss that the user wrote as an ONNX model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onward.errors import ModelError
from onward.losses.kind import LossKind

if TYPE_CHECKING:
    from onward.graph.losses.spec import LossNames
    from onward.graph.losses.writer import LossWriter


def _add(writer: LossWriter) -> LossNames:
    if writer.spec.graph is None:
        raise ModelError("loss.type is 'graph', but loss.graph, the path of the ONNX loss model, is missing.")
    loss, parts = writer.merge_model(writer.spec.graph)
    writer.compute_like(loss)
    value = writer.computed(loss)
    if value.shape is None or len(value.shape) > 0:
        value = writer.reduced(value)
    return writer.finish(value, outputs=parts)


GRAPH = LossKind(
    name="graph",
    add=_add,
    remark="your own ONNX loss model",
    required=("graph",),
    reads=("graph", "graph_inputs", "graph_output"),
    predictions=(),
    labels=(),
)
