"""A network layer by layer: shapes, parameters, bytes; a weight counts where it is read first."""

from __future__ import annotations

import numpy as np
import onnx

from onward.graph.training_graph import make_training_graph
from onward.lowering.summary import HEADINGS, NetSummary, summarize_graph


def summary(trainable: tuple[str, ...] = ("fc.weight", "out")) -> NetSummary:
    text = """<ir_version: 8, opset_import: ["": 18]> g (float[n, 3] x) => (float[n, 3] y)
        { a = MatMul(x, first) [again] b = MatMul(a, first) r = Relu(b) [last] y = Gemm(r, out) }"""
    proto = onnx.parser.parse_model(text)
    for name in ("first", "out"):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((3, 3), np.float32), name))
    for node in proto.graph.node:
        node.input[:] = ["fc.weight" if name == "first" else name for name in node.input]
    proto.graph.initializer[0].name = "fc.weight"
    return summarize_graph(make_training_graph(proto, tied_weights=("fc.weight",)), trainable)


def test_layers() -> None:
    found = summary()
    assert [(one.name, one.operator, one.output) for one in found.layers] == [
        ("fc", "MatMul", ("n", 3)), ("fc", "MatMul", ("n", 3)), ("last", "Gemm", ("n", 3)),
    ]  # fmt: skip
    assert [(one.trainable, one.bytes) for one in found.layers] == [(9, 36), (0, 0), (9, 36)]
    assert (found.other_nodes, found.trainable, found.frozen, found.bytes) == (1, 18, 0, 72)
    assert (found.inputs, found.outputs) == ({"x": "[n, 3]"}, {"y": "[n, 3]"})


def test_what_does_not_train_is_frozen() -> None:
    found = summary(("out",))
    assert (found.trainable, found.frozen) == (9, 9)
    assert found.rows[0] == HEADINGS
    assert found.rows[-1] == ("total", "1 further nodes", "", "9", "9", "72 B")
    assert "inputs  x [n, 3]" in str(found)
    assert repr(found) == str(found)
    assert "<table" in found._repr_html_()
