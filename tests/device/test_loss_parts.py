"""A loss of several means: traced once, its backward pass repeated for each."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onward.device.loss_parts import SELECTOR, repeat_for_parts
from onward.errors import ModelError

TEXT = """<ir_version: 8, opset_import: ["": 18]>
g (float[2, 3] x, float[2] loss_selector) => (float[2, 3] y, float[2] z) {
    square = Mul(x, x)
    first, second = Split<num_outputs=2>(loss_selector)
    a = Mul(square, first)
    b = Mul(x, second)
    y = Add(a, b)
    z = Identity(loss_selector)
}"""


def test_what_depends_on_the_selector_is_there_for_each_part() -> None:
    model = ir.from_proto(onnx.parser.parse_model(TEXT))
    found = repeat_for_parts(model, list(model.graph.outputs), 2)
    assert [value.name for value in model.graph.inputs] == ["x"]
    assert sum(node.op_type == "Mul" for node in model.graph) == 5  # the square once
    model.graph.outputs.clear()
    model.graph.outputs.extend(value for part in found for value in part)
    for value in model.graph.outputs:
        value.type = ir.TensorType(ir.DataType.FLOAT)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    results = session.run(None, {"x": x})
    for result, expected in zip(results, (x * x, [1, 0], x, [0, 1]), strict=True):
        assert np.array_equal(result, expected)


def test_a_branch_in_the_backward_pass_is_refused() -> None:
    then = "then_branch = t () => (float[2] one) { one = Identity(loss_selector) }"
    other = "else_branch = e () => (float[2] two) { two = Neg(loss_selector) }"
    nodes = f"on = Constant<value = bool {{1}}>()\n z = If<{then}, {other}>(on)"
    text = TEXT.replace("z = Identity(loss_selector)", nodes)
    model = ir.from_proto(onnx.parser.parse_model(text))
    with pytest.raises(ModelError, match=r"which needs several backward passes\. Set training.accumulate_as to mean"):
        repeat_for_parts(model, list(model.graph.outputs), 2)
    assert SELECTOR in {value.name for value in model.graph.inputs}
