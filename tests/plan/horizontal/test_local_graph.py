"""One rank's graph: ordinary, with its shards; the full graph is left alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from onward.graph.training_graph import make_training_graph
from onward.models import create_model
from onward.plan.horizontal.local_graph import localize
from onward.plan.shards import take_shard
from tests.plan.horizontal.graphs import CROSS_ENTROPY, gpt2, planned


def test_a_rank_gets_an_ordinary_graph_with_its_parts_and_the_whole_one_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    ir.save(create_model("gpt2", size="tiny", layers=1, heads=4, width=32, vocab_size=96), path, external_data="data")
    graph = make_training_graph(path, loss=CROSS_ENTROPY)
    plan = planned(graph, 2)
    before = [node.op_type for node in graph.model.graph]
    whole = {name: graph.model.graph.initializers[name].const_value.numpy().copy() for name in graph.weights}
    locals_ = [localize(graph, plan, rank) for rank in range(2)]
    assert [node.op_type for node in graph.model.graph] == before
    for rank, local in enumerate(locals_):
        assert local.weights == graph.weights
        assert local.loss == "loss"
        for name in graph.weights:
            stored = local.model.graph.initializers[name].const_value
            expected = take_shard(whole[name], plan.shardings.get(name), rank, 2)
            assert tuple(stored.shape.numpy()) == expected.shape
            np.testing.assert_array_equal(stored.numpy(), expected)
    types = [node.op_type for node in locals_[0].model.graph if node.domain == "onward.parallel"]
    assert types.count("AllReduce") == 4
    assert types.count("Enter") == 3
    assert types.count("AllGather") == 1
    assert [str(v.name) for v in locals_[0].model.graph.outputs] == [str(v.name) for v in graph.model.graph.outputs]


def test_one_rank_gets_the_graph_itself() -> None:
    graph = gpt2()
    plan = planned(graph, 1)
    assert localize(graph, plan, 0) is graph


def test_a_plan_of_another_graph_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the plan shards 'h\.1\.attn.*', which the graph does not have"):
        localize(gpt2(layers=1), planned(gpt2(layers=2), 2), 0)
