"""Graphs are simplified as onnxscript's own optimizer simplifies them, but for the rule that is left out."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnxscript import optimizer, rewriter

from onward.artifacts.simplification import _RULES, simplify

TEXT = """<ir_version: 8, opset_import: ["": 18, "own": 1]>
g (float[batch, 6] x) => (float[batch, 3] y, float[batch, 6] z)
<float[6] w = {1, 2, 3, 4, 5, 6}> {
    start = Constant<value_ints=[0]>()
    middle = Constant<value_ints=[3]>()
    end = Constant<value_ints=[6]>()
    along = Constant<value_ints=[1]>()
    doubled = Add(w, w)
    scaled = own.Scale(x, doubled)
    again = own.Scale(x, doubled)
    kept = Transpose<perm=[0, 1]>(again)
    left = Slice(scaled, start, middle, along)
    right = Slice(scaled, middle, end, along)
    unread = Exp(right)
    y = Add(left, right)
    z = Relu(kept)
}
<domain: "own", opset_import: ["": 18]> Scale (a, b) => (c) { c = Mul(a, b) }
"""


def outcome(model: ir.Model) -> tuple[Counter[str], list[np.ndarray]]:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    feeds = {"x": np.arange(12, dtype=np.float32).reshape(2, 6)}
    return Counter(node.op_type for node in model.graph), list(session.run(None, feeds))


def test_graphs_are_those_of_onnxscripts_optimizer() -> None:
    ours, theirs = (ir.from_proto(onnx.parser.parse_model(TEXT)) for _ in range(2))
    simplify(ours)
    optimizer.optimize_ir(theirs)
    operators, results = outcome(ours)
    expected, others = outcome(theirs)
    assert operators == expected == Counter(["Mul", "Slice", "Slice", "Add", "Relu"])
    for one, other in zip(results, others, strict=True):
        np.testing.assert_array_equal(one, other)


def test_all_other_rules_are_applied() -> None:
    assert len(_RULES) == len(rewriter._DEFAULT_REWRITE_RULES) - 1 > 20
