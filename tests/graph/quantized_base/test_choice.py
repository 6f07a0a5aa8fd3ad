"""Which frozen weights are stored in fewer bits, and what a note says of it."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onward.graph.quantized_base.choice import StoredBase, choose_base
from onward.graph.training_graph import TrainingGraph, make_training_graph
from onward.models.graph_writer import GraphWriter, normal
from onward.parameters import FrozenWeights
from tests.frozen_models import WIDTH, build_stack


def choose(model: ir.Model, dtype: Any, **arguments: Any) -> tuple[StoredBase, TrainingGraph]:
    graph = make_training_graph(model, fuse=True, **arguments)
    return choose_base(graph, FrozenWeights(dtype=dtype)), graph


def test_linear_layers_but_no_embedding_and_no_last_layer() -> None:
    base, graph = choose(build_stack(), "nf4", weights_to_train=["*.bias"])
    assert dict(base.axes) == {f"layer{layer}.weight": layer % 2 for layer in range(4)}  # the odd ones are [N, K]
    assert dict(base.others) == {"table": "an embedding", "head": "a last layer"}
    assert base.describe(graph) == (
        "frozen_weights.dtype: 4 frozen weights (0.3 MB in the file) are stored in nf4 in blocks of 64 in memory; not "
        "these (table: an embedding; head: a last layer)."
    )
    base, graph = choose(build_stack(), "bf16", weights_to_train=["*.bias"])
    assert set(base.axes) == {"table", "head", *(f"layer{layer}.weight" for layer in range(4))}
    assert not base.others


def _other_readers() -> ir.Model:
    """Gemm both ways, a convolution, a weight that two products sum over along different axes, a tied embedding."""
    writer = GraphWriter("others", 20, 0)
    ids = writer.input("ids", ir.DataType.INT64, ["batch"])
    image = writer.input("image", ir.DataType.FLOAT, ["batch", WIDTH, 2, 2])
    table = writer.weight("table", (WIDTH, WIDTH), normal(1.0))
    x = writer.op("Gather", table, ids)
    filtered = writer.op("Conv", image, writer.weight("filters", (WIDTH, WIDTH, 1, 1), normal(0.1)))
    x = writer.op("Add", x, writer.op("ReduceMean", filtered, writer.integers([2, 3]), keepdims=0))
    x = writer.op("Gemm", x, writer.weight("rows", (WIDTH, WIDTH), normal(0.1)), transB=1)
    x = writer.op("Gemm", x, writer.weight("columns", (WIDTH, WIDTH), normal(0.1)))
    both = writer.weight("both", (WIDTH, WIDTH), normal(0.1))
    x = writer.op("MatMul", writer.op("MatMul", x, both), writer.op("Transpose", both, perm=[1, 0]))
    narrow = writer.op("MatMul", x, writer.weight("narrow", (WIDTH, 8), normal(0.1)))
    x = writer.op("MatMul", narrow, writer.weight("wide", (8, WIDTH), normal(0.1)))
    x = writer.op("Mul", x, writer.weight("gain", (WIDTH,), normal(1.0)))
    y = writer.op("MatMul", x, writer.op("Transpose", table, perm=[1, 0]), name="y")
    return writer.finish([(y, ["batch", WIDTH])])


def test_every_other_reader_is_named() -> None:
    base, _ = choose(_other_readers(), "int8", weights_to_train=["gain"])
    assert dict(base.axes) == {"rows": 1, "columns": 0}
    assert dict(base.others) == {
        "table": "an embedding", "filters": "a convolution", "both": "summed over along different axes",
        "narrow": "4,096 elements or fewer", "wide": "4,096 elements or fewer",
    }  # fmt: skip
