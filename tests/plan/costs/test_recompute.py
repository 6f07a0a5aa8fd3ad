"""Which segments and which attention are recomputed, and what a memory budget chooses."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from onward.errors import ParametersError
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import TrainingGraph, make_training_graph
from onward.models import create_model
from onward.parameters.distributed import Recompute
from onward.plan.costs.costs import measure_costs
from onward.plan.costs.recompute import check_recompute, choose_for_budget, count_fused_attention, find_attention
from onward.plan.costs.segments import SegmentPlan, label_of, plan_segments
from tests.graph.fusion.pairs import parse

SIZES = {"batch": 2, "sequence": 8}


def gpt2(fused: bool, dropout: float = 0.0, layers: int = 2) -> TrainingGraph:
    model = create_model(
        "gpt2", size="tiny", layers=layers, heads=2, width=16, vocab_size=32, context_length=8, dropout=dropout
    )
    loss = LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels")
    return make_training_graph(model, loss=loss, fuse=fused)


def plan(graph: TrainingGraph, **fields: Any) -> SegmentPlan:
    costs = measure_costs(graph, SIZES).nodes
    return plan_segments(graph.model.graph, graph.weights, False, Recompute(**fields), costs=costs)


def names_in(graph: TrainingGraph, plan: SegmentPlan, segment: int) -> list[ir.Node]:
    return [node for node in graph.model.graph if plan.segment_of[label_of(node)] == segment]


def test_written_out_attention_reaches_from_the_score_to_the_value_product() -> None:
    found = find_attention(gpt2(fused=False).model.graph, ())
    assert len(found) == 2
    for core in found:
        kinds = [node.op_type for node in core]
        assert kinds.count("MatMul") == 2
        assert kinds.count("Softmax") == 1


def test_attention_of_one_kernel_keeps_no_scores_unless_it_drops_out() -> None:
    assert find_attention(gpt2(fused=True).model.graph, ()) == []
    assert count_fused_attention(gpt2(fused=True).model.graph, ()) == 2
    assert [len(core) for core in find_attention(gpt2(fused=True, dropout=0.1).model.graph, ())] == [1, 1]


@pytest.mark.parametrize(("trained", "found"), [(("table",), 1), ((), 0), (("w",), 0)])
def test_attention_with_a_bias_that_trains_keeps_its_scores(trained: tuple[str, ...], found: int) -> None:
    """torch's kernels have no gradient for a mask; a mask that is computed from another weight's constant has none."""
    body = (
        "q = MatMul(x, w)\nkt = Transpose<perm=[0,1,3,2]>(q)\ns = MatMul(q, kt)\n"
        "b = Gather(table, places)\nm = Add(s, b)\np = Softmax<axis=-1>(m)\ny = MatMul(p, q)"
    )
    stored = {"w": np.eye(8, dtype=np.float32), "table": np.ones((9, 4, 4), np.float32), "places": np.array([1, 2])}
    model = parse("float[2,2,4,8] x", "float[2,2,4,8] y", body, stored, 18)
    graph = make_training_graph(model, fuse=True).model.graph
    assert sum(node.op_type == "Attention" for node in graph) == 1
    assert len(find_attention(graph, trained)) == found
    assert count_fused_attention(graph, trained) == 1 - found


def test_attention_segments_hold_attention_and_nothing_else() -> None:
    graph = gpt2(fused=False)
    cut = plan(graph, attention=True)
    assert cut.count == 5
    assert cut.recomputed == {1, 3}
    for segment, core in zip((1, 3), find_attention(graph.model.graph, graph.weights), strict=True):
        assert set(names_in(graph, cut, segment)) == core
    assert not any(1 in readers for readers in cut.readers.values()), "attention reads no weight"


def test_segments_go_up_along_the_data_flow() -> None:
    graph = gpt2(fused=False)
    for fields in ({"attention": True}, {"memory_budget": 0.5}):
        cut = plan(graph, **fields)
        for node in graph.model.graph:
            for value in node.inputs:
                source = None if value is None else value.producer()
                if source is not None:
                    assert cut.segment_of[label_of(source)] <= cut.segment_of[label_of(node)]


def test_all_segments_but_the_last_or_the_first_so_many() -> None:
    graph = gpt2(fused=True)
    every = plan(graph, segments=True)
    assert every.recomputed == set(range(every.count - 1))
    assert plan(graph, segments=True, number_recompute_layers=2).recomputed == {0, 1}
    assert plan(graph, segments=True, number_recompute_layers=99).recomputed == every.recomputed


def test_a_stage_without_the_loss_recomputes_its_last_segment_too() -> None:
    graph = gpt2(fused=True)
    inner = plan_segments(graph.model.graph, graph.weights, False, Recompute(segments=True), holds_loss=False)
    assert inner.recomputed == set(range(inner.count))


def test_a_smaller_budget_recomputes_more_and_1_nothing() -> None:
    graph = gpt2(fused=False, layers=4)
    prices = []
    costs = measure_costs(graph, SIZES).nodes
    for budget in (1.0, 0.8, 0.5, 0.2):
        cut = plan(graph, memory_budget=budget)
        again = [node for node in graph.model.graph if cut.segment_of[label_of(node)] in cut.recomputed]
        prices.append(sum(costs[str(node.outputs[0].name)].time.forward for node in again))
    assert prices[0] == 0
    assert prices == sorted(prices)
    assert prices[-1] > prices[1] > 0


def test_a_budget_takes_what_frees_most_for_its_work() -> None:
    graph = gpt2(fused=False)
    costs = measure_costs(graph, SIZES).nodes
    parts = [[node] for node in graph.model.graph]
    total = sum(cost.kept_bytes for cost in costs.values())
    taken = choose_for_budget(parts, range(len(parts)), 0.9, costs)
    freed = sum(costs[str(parts[index][0].outputs[0].name)].kept_bytes for index in taken)
    assert taken == frozenset(), "a node alone frees nothing: its result is read outside"
    assert freed == 0 < total


def test_a_model_without_attention_is_told_so() -> None:
    model = create_model("mnist", variant="gemm")
    spec = LossSpec(type="softmax_cross_entropy", prediction=str(model.graph.outputs[0].name), label="labels")
    graph = make_training_graph(model, loss=spec)
    with pytest.raises(ParametersError) as error:
        check_recompute(graph.model.graph, Recompute(attention=True), graph.weights)
    assert str(error.value) == (
        "recompute.attention is true, but the model has no attention: no softmax between two matmuls of activations. "
        "Use recompute.segments or recompute.memory_budget instead."
    )


def test_nothing_to_recompute_is_said() -> None:
    assert check_recompute(gpt2(fused=True).model.graph, Recompute(attention=True), ()) == (
        "recompute.attention: nothing to do. All 2 attentions are computed by one kernel each, which keeps no scores "
        "(speed.fusions_off: [attention] would expand them again)."
    )
    assert check_recompute(gpt2(fused=False).model.graph, Recompute(attention=True), ()) is None
    assert check_recompute(gpt2(fused=True).model.graph, Recompute(segments=True), ()) is None
