"""Sequences and optionals: made, changed, joined; nothing is changed in place; gradients pass through."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

import onward
from onward.errors import NodeError
from tests.lowering.ops.test_control_flow import parse
from tests.one_node import check_gradients, run_onnxruntime, to_array

A, B, C = (torch.tensor(v, dtype=torch.float64) for v in ([1.0, 2.0], [3.0], [4.0, 5.0, 6.0]))


def joined(steps: str) -> onnx.ModelProto:
    """A model that changes the sequence `s` of a, b, c into `t`, and joins `t` and `s`."""
    return parse(
        f"""
        change (double[n] a, double[m] b, double[k] c) => (double[x] y, double[z] untouched, int64 length)
        <int64 first = {{0}}, int64 second = {{1}}, int64 before_last = {{-1}}>
        {{
          s = SequenceConstruct (a, b, c)
          {steps}
          y = ConcatFromSequence <axis = 0> (t)
          untouched = ConcatFromSequence <axis = 0> (s)
          length = SequenceLength (t)
        }}
        """
    )


STEPS = {
    "t = SequenceInsert (s, b)": [1, 2, 3, 4, 5, 6, 3],
    "t = SequenceInsert (s, c, first)": [4, 5, 6, 1, 2, 3, 4, 5, 6],
    "t = SequenceInsert (s, b, before_last)": [1, 2, 3, 3, 4, 5, 6],
    "t = SequenceErase (s)": [1, 2, 3],
    "t = SequenceErase (s, second)": [1, 2, 4, 5, 6],
    "e = SequenceAt (s, before_last) t = SequenceConstruct (e, e)": [4, 5, 6, 4, 5, 6],
    "t = SequenceMap (s, b) <body = f (double[p] u, double[q] v) => (double[r] w) { w = Mul (u, v) }>": [
        3, 6, 9, 12, 15, 18,
    ],
}  # fmt: skip


@pytest.mark.parametrize("steps", list(STEPS))
def test_sequences(steps: str) -> None:
    model = joined(steps)
    y, untouched, length = onward.to_torch(model)(A, B, C)
    assert y.tolist() == STEPS[steps]
    assert untouched.tolist() == [1, 2, 3, 4, 5, 6]
    assert length.item() == int(run_onnxruntime(model, A, B, C)[2])
    check_gradients(model, A, B, C, outputs=(0,))


SPLITS = {
    "split_to = SplitToSequence (x)": [1, 1, 1, 1, 1],
    "split_to = SplitToSequence <axis = 0> (x, two)": [2, 2, 1],
    "split_to = SplitToSequence (x, parts)": [1, 4],
    "split_to = SplitToSequence <axis = 1, keepdims = 0> (x)": [5, 5],
}


@pytest.mark.parametrize("step", list(SPLITS))
def test_split_to_sequence(step: str) -> None:
    model = parse(
        f"""
        cut (float[5, 2] x) => (seq(float) split_to)
        <int64 two = {{2}}, int64[2] parts = {{1, 4}}>
        {{ {step} }}
        """
    )
    x = torch.arange(10.0).reshape(5, 2)
    result = onward.to_torch(model)(x)
    assert [part.shape[0] for part in result] == SPLITS[step]
    for left, right in zip(result, run_onnxruntime(model, x)[0], strict=True):
        np.testing.assert_array_equal(to_array(left), right)


def test_stacking_on_a_new_axis() -> None:
    model = parse(
        "stack (double[2] a, double[2] b) => (double[2, 2] y) "
        "{ s = SequenceConstruct (a, b) y = ConcatFromSequence <axis = -1, new_axis = 1> (s) }"
    )
    a, b = torch.tensor([1.0, 2.0]).double(), torch.tensor([3.0, 4.0]).double()
    assert onward.to_torch(model)(a, b).tolist() == [[1, 3], [2, 4]]
    check_gradients(model, a, b)


def test_optionals() -> None:
    model = parse(
        """
        maybe (double[2] x) => (double[2] y, bool full)
        { o = Optional (x) full = OptionalHasElement (o) y = OptionalGetElement (o) }
        """
    )
    x = torch.tensor([1.0, 2.0]).double()
    y, full = onward.to_torch(model)(x)
    assert torch.equal(y, x)
    assert full.dtype == torch.bool
    assert full.item()
    check_gradients(model, x)


def test_positions_out_of_range_are_named() -> None:
    with pytest.raises(NodeError, match="position 1 is out of range for a sequence of 1"):
        onward.to_torch(joined("o = SequenceConstruct (a) t = SequenceErase (o, second)"))(A, B, C)


def test_an_empty_optional_has_no_element() -> None:
    node = onnx.helper.make_node(
        "Optional", [], ["o"], type=onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [2])
    )
    graph = onnx.helper.make_graph(
        [node, onnx.helper.make_node("OptionalGetElement", ["o"], ["y"])],
        "empty",
        [],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2])],
    )
    with pytest.raises(NodeError, match="the optional is empty; test it with OptionalHasElement first"):
        onward.to_torch(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)]))()
