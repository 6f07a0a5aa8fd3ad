"""What a batch counts for in a mean over several batches, as nodes: its samples, its labels, or their weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from onward.graph.nodes.node_writer import NodeWriter
from onward.losses.labels import LabelCount

FLOAT = ir.DataType.FLOAT


def append_count(
    writer: NodeWriter, inputs: Mapping[str, ir.Value], feature: ir.Value, counted: LabelCount | None
) -> ir.Value:
    """A float32 of rank 0: what the loss of a batch is a mean over.

    Args:
        writer: of the graph.
        inputs: by name.
        feature: an input whose first axis is the batch.
        counted: the labels; None: samples.
    """
    if counted is None:
        return writer.cast(writer.squeeze(writer.size_of(feature, 0), 0), FLOAT)
    labels = inputs[counted.feature]
    if counted.is_constant:
        return writer.cast(writer.apply("Size", labels), FLOAT)
    integers = writer.cast(labels, ir.DataType.INT64)
    counts: ir.Value | None = None
    if counted.ignored is not None:
        ignored = writer.constant(counted.ignored, "ignored_label")
        counts = writer.apply("Not", writer.apply("Equal", integers, ignored), name="counted")
    if counted.class_weights is None:
        assert counts is not None
        return writer.reduce_all(writer.cast(counts, FLOAT), "sum")
    classes = writer.constant(np.asarray(counted.class_weights), "class_weights", np.float32)
    if counts is None:
        return writer.reduce_all(writer.apply("Gather", classes, integers), "sum")
    # A label that does not count may be no class.
    zero = writer.constant(0, "no_class")
    weights = writer.apply("Gather", classes, writer.apply("Where", counts, integers, zero))
    return writer.reduce_all(writer.apply("Mul", weights, writer.cast(counts, FLOAT)), "sum")
