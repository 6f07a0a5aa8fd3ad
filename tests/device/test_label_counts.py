"""What a batch counts for, run by onnxruntime, against numpy."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from onward.artifacts.optimizer_graph import add_input, add_output, empty_model
from onward.device.label_counts import append_count
from onward.graph.nodes.node_writer import NodeWriter
from onward.losses.labels import LabelCount

LABELS = np.array([[0, 2, 3], [1, -1, 3]])
WEIGHTS = (0.5, 2.0, 4.0, 8.0)


@pytest.mark.parametrize(
    ("counted", "expected"),
    [
        (None, 2.0),
        (LabelCount("label"), 6.0),
        (LabelCount("label", ignored=-1), 5.0),
        (LabelCount("label", ignored=-1, class_weights=WEIGHTS), 0.5 + 4 + 8 + 2 + 8),
    ],
)
def test_counts(counted: LabelCount | None, expected: float) -> None:
    model = empty_model("count")
    label = add_input(model, "label", ir.DataType.INT64, ("batch", "tokens"))
    count = append_count(NodeWriter(model, "count/"), {"label": label}, label, counted)
    add_output(model, count, "count", ir.DataType.FLOAT, ())
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    (found,) = session.run(None, {"label": LABELS})
    assert found == expected


def test_weights_where_no_label_is_ignored() -> None:
    model = empty_model("count")
    label = add_input(model, "label", ir.DataType.INT64, ("batch",))
    counted = LabelCount("label", class_weights=WEIGHTS)
    count = append_count(NodeWriter(model, "count/"), {"label": label}, label, counted)
    add_output(model, count, "count", ir.DataType.FLOAT, ())
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    assert session.run(None, {"label": np.array([3, 3, 1])}) == [18.0]
