"""Splits into sequences that become plain ones: values as onnxruntime's, names kept, and what is left alone."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import parser

import onward
from onward.errors import NodeError
from onward.graph.training_graph import make_training_graph

KEPT = "split = Constant <value_ints = [4, 2]> ()  s = SplitToSequence <axis = 1> (m, split)"
CHUNKS = "four = Constant <value_int = 4> ()  s = SplitToSequence <axis = 1> (m, four)"
ONE_BY_ONE = "s = SplitToSequence <axis = 1> (m)"
PARTS = "a = SequenceAt (s, last)  b = SequenceAt (s, first)"


def model(
    split: str, parts: str = PARTS, outputs: str = "float[3, A] a, float[3, B] b", opset: int = 17
) -> onnx.ModelProto:
    weight = onnx.numpy_helper.from_array(np.arange(30, dtype=np.float32).reshape(5, 6) / 30, "w")
    found = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : {opset}]>
        g (float[3, 5] x) => ({outputs}) {{
            m = MatMul (x, w)  first = Constant <value_int = 0> ()  last = Constant <value_int = -1> ()
            {split}  {parts}
        }}""")
    found.graph.initializer.append(weight)
    onnx.checker.check_model(found)
    return found


def operators(source: onnx.ModelProto, keep: tuple[str, ...] = ()) -> list[str]:
    graph = make_training_graph(source, keep=keep)
    return [node.op_type for node in graph.model.graph if node.op_type != "Constant"]


@pytest.mark.parametrize("opset", [12, 13, 18])
@pytest.mark.parametrize("split", [KEPT, CHUNKS, ONE_BY_ONE])
def test_parts_are_those_of_onnxruntime(split: str, opset: int) -> None:
    source = model(split, opset=opset)
    assert operators(source) == ["MatMul", "Split"]
    x = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    session = onnxruntime.InferenceSession(source.SerializeToString(), providers=["CPUExecutionProvider"])
    net = onward.to_torch(source)
    results = net(torch.from_numpy(x))
    for found, expected in zip(results, session.run(["a", "b"], {"x": x}), strict=True):
        np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-6, atol=1e-6)


def test_weights_before_the_split_have_the_gradient_of_its_parts() -> None:
    """Of the sum of the last two columns: each such column of w gets the sums of x."""
    net = onward.to_torch(model(KEPT))
    x = torch.randn(3, 5)
    net(x)[0].sum().backward()
    expected = torch.zeros(5, 6)
    expected[:, 4:] = x.sum(0)[:, None]
    gradient = net.weights["w"].grad
    assert gradient is not None
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("parts", "outputs"),
    [
        ("a = SequenceAt (s, last)  n = SequenceLength (s)", "float[3, A] a, int64 n"),
        ("a = SequenceAt (s, last)  b = SequenceAt (s, last)", "float[3, A] a, float[3, B] b"),
        ("n = SequenceLength (s)  one = Sub (n, n)  a = SequenceAt (s, one)", "float[3, A] a"),
    ],
)
def test_a_sequence_that_is_read_otherwise_stays(parts: str, outputs: str) -> None:
    assert "SplitToSequence" in operators(model(KEPT, parts, outputs))


def test_a_part_that_is_not_there_is_an_error_of_the_run() -> None:
    source = model(KEPT, "two = Constant <value_int = 2> ()  a = SequenceAt (s, two)", "float[3, A] a")
    assert "SplitToSequence" in operators(source)
    with pytest.raises(NodeError, match="position 2 is out of range for a sequence of 2"):
        onward.to_torch(source)(torch.zeros(3, 5))


def test_a_sequence_that_somebody_names_stays() -> None:
    assert operators(model(KEPT), keep=("s",)) == ["MatMul", "SplitToSequence", "SequenceAt", "SequenceAt"]
