"""Where graphs are cut into segments, and which of them are recomputed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onward.graph.fusion.cross_entropy import FUSED_LOSS
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.models import create_model
from onward.parameters.distributed import Recompute
from onward.plan.costs import segments
from onward.plan.costs.segments import assign, label_of, plan_segments
from tests.plan.staged_models import graph_of


def plan(name: str, cut: bool = True, **recompute: object) -> object:
    graph = graph_of(name)
    return plan_segments(graph.model.graph, graph.weights, cut, Recompute(**recompute))  # type: ignore[arg-type]


def test_a_graph_that_nothing_asks_to_cut_is_one_segment() -> None:
    found = plan("gpt2", cut=False)
    assert found.count == 1  # type: ignore[attr-defined]
    assert set(found.readers.values()) == {(0,)}  # type: ignore[attr-defined]


def test_segments_ascend_and_hold_every_node_once() -> None:
    graph = graph_of("gpt2")
    found = plan_segments(graph.model.graph, graph.weights, True, Recompute())
    order = [found.segment_of[label_of(node)] for node in graph.model.graph]
    assert order == sorted(order)
    assert set(order) == set(range(found.count))
    assert found.count >= 5, "four layers and what is around them"
    assert found.recomputed == frozenset()


def test_layers_read_their_own_weights_and_the_tied_table_is_read_at_both_ends() -> None:
    graph = graph_of("gpt2")
    found = plan_segments(graph.model.graph, graph.weights, True, Recompute())
    table = found.readers["wte.weight"]
    assert len(table) == 2
    assert table[0] < table[1]
    assert all(len(segments) == 1 for name, segments in found.readers.items() if name != "wte.weight")


def test_recompute_takes_all_segments_but_the_last_or_the_first_so_many() -> None:
    whole = plan("gpt2", cut=False, segments=True)
    assert whole.recomputed == frozenset(range(whole.count - 1))  # type: ignore[attr-defined]
    two = plan("gpt2", cut=False, segments=True, number_recompute_layers=2)
    assert two.recomputed == frozenset({0, 1})  # type: ignore[attr-defined]


def test_blocks_that_repeat_are_joined_for_compilation_unless_something_is_recomputed() -> None:
    graph = graph_of("gpt2")
    arguments = graph.model.graph, graph.weights, True
    fine = plan_segments(*arguments, Recompute())
    joined = plan_segments(*arguments, Recompute(), blocks_joined=1)
    layer_of = {name: joined.readers[name] for name in joined.readers if name.startswith("h.")}
    for layer in range(4):
        homes = {segments for name, segments in layer_of.items() if name.startswith(f"h.{layer}.")}
        assert len(homes) == 1, "all weights of a layer are read by one segment"
    assert len(set(layer_of.values())) == 4
    assert joined.count == fine.count - 4, "attention and what follows it are one"
    assert [joined.segment_of[label_of(node)] for node in graph.model.graph] == sorted(joined.segment_of.values())
    asked = Recompute(segments=True)
    assert plan_segments(*arguments, asked, blocks_joined=1) == plan_segments(*arguments, asked)


def test_neighbors_of_which_none_repeats_are_joined_up_to_a_number_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of("squeezenet")
    arguments = graph.model.graph, graph.weights, True
    fine, coarse = (plan_segments(*arguments, Recompute(), blocks_joined=1, joins_others=on) for on in (False, True))
    assert fine.count > 10
    assert coarse.count == 1
    monkeypatch.setattr(segments, "MOST_JOINED_NODES", 30)
    limited = plan_segments(*arguments, Recompute(), blocks_joined=1, joins_others=True)
    sizes = Counter(limited.segment_of.values())
    assert 1 < len(sizes) < fine.count
    assert max(sizes.values()) <= 30


@pytest.mark.parametrize(("most", "segment_count"), [(3, 4), (4, 1)])
def test_blocks_that_repeat_a_few_times_are_joined(
    most: int, segment_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More are a segment each, which is compiled once for all of them."""
    monkeypatch.setattr(segments, "MOST_JOINED_BLOCKS", most)
    gpt2 = graph_of("gpt2")
    plan = plan_segments(gpt2.model.graph, gpt2.weights, True, Recompute(), blocks_joined=1, joins_others=True)
    homes = [{plan.readers[n] for n in plan.readers if n.startswith(f"h.{layer}.")} for layer in range(4)]
    assert all(len(home) == 1 for home in homes)
    assert len(set.union(*homes)) == segment_count


@pytest.mark.parametrize(("blocks", "homes"), [(1, [0, 1, 2, 3]), (2, [0, 0, 1, 1]), (3, [0, 0, 1, 1]), (4, [0] * 4)])
def test_so_many_blocks_become_a_segment_that_all_are_equal(blocks: int, homes: list[int]) -> None:
    gpt2 = graph_of("gpt2")
    plan = plan_segments(gpt2.model.graph, gpt2.weights, True, Recompute(), blocks_joined=blocks)
    found = [{plan.readers[n] for n in plan.readers if n.startswith(f"h.{layer}.")} for layer in range(4)]
    assert all(len(home) == 1 for home in found)
    order = list(dict.fromkeys(home.pop() for home in [set(one) for one in found]))
    assert [order.index(*home) for home in found] == homes


@pytest.mark.parametrize(("count", "most", "together"), [(12, 4, 4), (9, 4, 3), (10, 4, 4), (5, 4, 3), (6, 1, 1)])
def test_blocks_are_divided_evenly(count: int, most: int, together: int) -> None:
    assert segments._together(count, most) == together


def test_weights_are_read_where_views_of_them_are() -> None:
    """ZeRO 3 frees a gathered weight after the last segment that reads it: a view of it must not live longer."""
    text = """agraph (float[B,4] x, float[4,4] a, float[4,4] b, float[4,4] c, float[1,4] d) => (float[B,4] y) {
        bt = Transpose(b)  cost = Cast <to=1> (c)  ct = Identity(cost)
        n = Shape(x)  dx = Expand(d, n)  s = Add(x, x)  h = Add(dx, s)
        i = MatMul(h, a)  j = Tanh(i)  k = MatMul(j, bt)  l = Tanh(k)  y = MatMul(l, ct)}"""
    model = ir.from_proto(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> {text}'))
    for name in "abcd":
        value = next(value for value in model.graph.inputs if value.name == name)
        model.graph.inputs.remove(value)
        value.const_value = ir.Tensor(np.zeros([4 if size == 4 else 1 for size in value.shape or ()], np.float32))
        model.graph.register_initializer(value)
    nodes = list(model.graph)
    parts = [nodes[:5], nodes[5:9], nodes[9:11], nodes[11:]]
    _, readers = assign(parts, "abcd")
    assert readers == {"a": (1,), "b": (0, 2), "c": (0, 3), "d": (0, 1)}


@pytest.mark.parametrize("joins_loss", [False, True])
def test_the_loss_of_the_last_layer_is_joined_where_it_is_to_be_compiled(joins_loss: bool) -> None:
    model = create_model("gpt2", size="tiny", width=32, heads=2, vocab_size=256, context_length=16, dropout=0.0)
    spec = LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels")
    gpt2 = make_training_graph(model, loss=spec, fuse=True)
    (loss,) = (node for node in gpt2.model.graph if node.op_type == FUSED_LOSS)
    arguments = gpt2.model.graph, gpt2.weights, True, Recompute()
    found = plan_segments(*arguments, blocks_joined=1, joins_others=True, joins_loss=joins_loss)
    assert found.count == (1 if joins_loss else 2)
    assert found.segment_of[label_of(loss)] == found.count - 1
