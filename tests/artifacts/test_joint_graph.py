"""Tracing with open sizes: arithmetic of shapes stays arithmetic, and no size is fixed by it."""

from __future__ import annotations

import onnx
import pytest
import torch

from onward.artifacts.joint_graph import JointGraph, trace_joint_graph
from onward.errors import ModelError
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule

EXPANDED = """<ir_version: 8, opset_import: ["": 18]> g (float[batch, length, 4] x) => (float loss) {
    shape = Shape(x)
    kept = Constant<value_ints=[0]>()
    zero = Constant<value_int=0>()
    one = Constant<value_int=1>()
    b = Gather(shape, zero)
    l = Gather(shape, one)
    b1 = Unsqueeze(b, kept)
    l1 = Unsqueeze(l, kept)
    heads = Constant<value_ints=[-1]>()
    joined = Concat<axis=0>(b1, l1, heads)
    flat = Constant<value_ints=[-1]>()
    asked = Reshape(joined, flat)
    size = Shape(asked)
    ones = ConstantOfShape<value = int64[1] {1}>(size)
    less = Constant<value_int=-1>()
    none = Mul(ones, less)
    same = Equal(asked, none)
    sizes = Where(same, ones, asked)
    wide = Expand(w, sizes)
    product = Mul(wide, x)
    waves = Sin(product)
    loss = ReduceMean<keepdims=0>(waves)
}"""
"""How torch's older exporter writes `w.expand(batch, length, -1)`."""


def _trace(text: str, weight: torch.Tensor, sizes: dict[str, int]) -> JointGraph:
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight.numpy(), "w"))
    graph = make_training_graph(model, loss=LossSpec(type="output", prediction="loss"))
    assert graph.loss is not None
    return trace_joint_graph(OnnxModule(graph, (graph.loss,)).train(), sizes)


@pytest.mark.parametrize("sizes", [{}, {"batch": 2}])
def test_expansion_as_the_older_exporter_writes_it_keeps_sizes_open(sizes: dict[str, int]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(4)
    joint = _trace(EXPANDED, weight, sizes)
    assert joint.sizes.shapes["x"] == (sizes.get("batch", "batch"), "length", 4)
    for length in (1, 6):
        x, leaf = torch.randn(2, length, 4), weight.clone().requires_grad_()
        loss = (leaf.expand(2, length, -1) * x).sin().mean()
        loss.backward()
        (code,), (use,) = joint.codes, joint.uses
        found, gradient = code.code(*({"x": x, "w": weight, **joint.constants}[name] for name in use.reads))
        assert torch.allclose(found, loss)
        assert torch.allclose(gradient, leaf.grad, atol=1e-6)


def test_a_size_computed_from_data_is_refused() -> None:
    text = EXPANDED.replace("joined = Concat<axis=0>(b1, l1, heads)", """
        total = ReduceSum<keepdims=0>(x)
        number = Cast<to=7>(total)
        rows = Unsqueeze(number, kept)
        joined = Concat<axis=0>(rows, l1, heads)""")  # fmt: skip
    with pytest.raises(ModelError, match="computes shapes or control flow from its data"):
        _trace(text, torch.randn(4), {})


TWO_INPUTS = """<ir_version: 8, opset_import: ["": 18]>
g (float[rows, length, 4] x, float[others, 4] y) => (float loss) {
    first = Constant<value_ints=[0]>()
    rows = Shape<start=0, end=1>(FROM)
    rest = Constant<value_ints=[-1, 4]>()
    sizes = Concat<axis=0>(rows, rest)
    wide = Mul(w, x)
    split = Reshape(wide, sizes)
    means = ReduceMean(split)
    logs = ReduceMean(y)
    sum = Add(means, logs)
    loss = ReduceMean<keepdims=0>(sum)
}"""
"""Two inputs whose batches an exporter named apart; one may be cut by the batch of the other."""


@pytest.mark.parametrize(("source", "batch"), [("x", "others"), ("y", "rows")])
def test_batches_named_apart_are_one_only_where_they_have_to_be(source: str, batch: str) -> None:
    joint = _trace(TWO_INPUTS.replace("FROM", source), torch.randn(4), {})
    assert joint.sizes.shapes == {"x": ("rows", "length", 4), "y": (batch, 4)}
    assert list(joint.sizes.examples) == ["rows", "length", "others"][: 3 if source == "x" else 2]


POSITIONS = """<ir_version: 8, opset_import: ["": 18]> g (float[batch, length, 4] x) => (float loss) {
    table = Constant<value = int64[1, 12] {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8}>()
    first = Constant<value_ints=[0]>()
    along = Constant<value_ints=[1]>()
    length = Shape<start=1, end=2>(x)
    positions = Slice(table, first, length, along)
    vectors = Gather<axis=0>(w, positions)
    sum = Add(x, vectors)
    waves = Sin(sum)
    loss = ReduceMean<keepdims=0>(waves)
}"""
"""Embeddings of positions that are cut from a small table of integers, as exports of BERT have it."""


def test_a_small_table_cut_to_the_length_keeps_it_open() -> None:
    torch.manual_seed(0)
    weight = torch.randn(10, 4)
    joint = _trace(POSITIONS, weight, {})
    assert joint.sizes.shapes["x"] == ("batch", "length", 4)
    for batch, length in ((2, 6), (3, 11)):
        x, leaf = torch.randn(batch, length, 4), weight.clone().requires_grad_()
        positions = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])[:, :length]
        loss = (x + leaf[positions]).sin().mean()
        loss.backward()
        (code,), (use,) = joint.codes, joint.uses
        found, gradient = code.code(*({"x": x, "w": weight, **joint.constants}[name] for name in use.reads))
        assert torch.allclose(found, loss)
        assert torch.allclose(gradient, leaf.grad, atol=1e-6)
