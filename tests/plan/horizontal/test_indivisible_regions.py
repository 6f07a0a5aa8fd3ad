"""Sizes that do not divide heads, groups or channels: the run is refused, or the user is notified of what stays
unsharded."""

from __future__ import annotations

import dataclasses

import pytest

from onward.errors import ParametersError
from onward.graph.training_graph import TrainingGraph
from onward.graph.weights.names import WeightNames
from onward.lowering.building.shapes import find_value_facts
from onward.plan.horizontal.planning import HorizontalPlan, plan_horizontal
from tests.plan.horizontal.graphs import gpt2, parsed, planned


def allowed(graph: TrainingGraph, size: int, shape: tuple[int, ...] = (2, 7)) -> HorizontalPlan:
    facts = find_value_facts(graph, dict.fromkeys([str(v.name) for v in graph.model.graph.inputs], shape))
    return plan_horizontal(graph, size, facts.shapes, facts.numbers, allow_whole_layers=True)


def refusal(graph: TrainingGraph, size: int, shape: tuple[int, ...] = (2, 7)) -> str:
    with pytest.raises(ParametersError) as error:
        planned(graph, size, shape)
    return str(error.value)


def two_layers(hidden: int, other: int) -> TrainingGraph:
    """Two layers one after the other, each of which could be cut by its hidden features."""
    return parsed(
        "agraph (float[B,16] x, float[16,H] a, float[H,16] b, float[16,O] c, float[O,3] d) => (float[B,3] loss)"
        "{h = MatMul(x, a) r = Relu(h) y = MatMul(r, b) n = Softmax(y) i = MatMul(n, c) s = Relu(i)"
        "loss = MatMul(s, d)}",
        {"a": (16, hidden), "b": (hidden, 16), "c": (16, other), "d": (other, 3)},
    )


def test_heads_and_features_are_named_with_the_weights_and_the_sizes_that_fit() -> None:
    message = refusal(gpt2(layers=2), 3)
    assert message == (
        "distributed.horizontal_parallel_size is 3, but 3 does not divide the 4 heads of 'h.0.attn.c_attn.weight' and "
        "5 more (sizes that can: 2, 4); 3 does not divide the 128 features of 'h.0.mlp.c_fc.weight' and 5 more (sizes "
        "that can: 2, 4, 8, 16, 32, 64, 128). Sizes that divide every layer: 2, 4. distributed.allow_whole_layers: "
        "true trains anyway, with these layers unsharded on every rank. Data and pipeline parallelism need no "
        "divisor."
    )


@pytest.mark.parametrize("size", [2, 4])
def test_the_sizes_that_are_listed_are_taken_without_a_word(size: int) -> None:
    plan = planned(gpt2(layers=2), size)
    assert plan.notes == ()
    assert {"h.0.attn.c_attn.weight", "h.1.mlp.c_fc.weight"} <= set(plan.shardings)


def test_heads_alone_are_enough_to_refuse() -> None:
    message = refusal(gpt2(heads=12, width=48), 8)
    assert (
        "8 does not divide the 12 heads of 'h.0.attn.c_attn.weight' and 2 more (sizes that can: 2, 3, 4, 6, 12)"
        in message
    )
    assert "features" not in message
    assert "Sizes that divide every layer: 2, 3, 4, 6, 12." in message


def test_who_allows_it_gets_the_other_layers_sharded_and_is_notified() -> None:
    plan = allowed(gpt2(heads=12, width=48), 8)
    assert "h.0.attn.c_attn.weight" not in plan.shardings
    assert "h.0.mlp.c_fc.weight" in plan.shardings
    for name in ("c_attn.weight", "c_attn.bias", "c_proj.weight"):
        expected = "8 ranks cannot share the 12 heads; sizes that can: 2, 3, 4, 6, 12"
        assert plan.reasons[f"h.0.attn.{name}"] == expected
    (note,) = plan.notes
    # (48 + 1) * 144 + 48 * 48 of them, and (48 + 1) * 192 + 192 * 48 of the MLP.
    assert note.startswith(
        "every tensor-parallel rank holds 33.4% of the layers unsharded: 8 does not divide the 12 heads of"
    )


def test_a_stray_layer_stays_whole_and_the_user_is_notified() -> None:
    graph = two_layers(hidden=256, other=6)
    plan = planned(graph, 4, (5, 16))
    assert plan.regions == (("a", "b"),)
    assert plan.notes == (
        "every tensor-parallel rank holds 1.4% of the layers unsharded: 4 does not divide the 6 features of 'c' and 1 "
        "more (sizes that can: 2, 3, 6).",
    )
    assert "'c' and 1 more" in refusal(two_layers(hidden=64, other=10), 4, (5, 16))


def test_channels_of_convolutions_are_called_so() -> None:
    graph = parsed(
        "agraph (float[B,2,5,5] x, float[6,2,3,3] a, float[3,6,1,1] b) => (float[B,3,3,3] loss)"
        "{h = Conv(x, a) r = Relu(h) loss = Conv(r, b)}",
        {"a": (6, 2, 3, 3), "b": (3, 6, 1, 1)},
    )
    assert "4 does not divide the 6 channels of 'a' and 1 more (sizes that can: 2, 3, 6)" in refusal(
        graph, 4, (2, 2, 5, 5)
    )


def test_layers_that_no_size_divides_together() -> None:
    message = refusal(two_layers(hidden=9, other=10), 4, (5, 16))
    assert "No size divides every layer. Data and pipeline" in message
    assert "allow_whole_layers" not in message
    assert planned(two_layers(hidden=9, other=9), 3, (5, 16)).regions == (("a", "b"), ("c", "d"))


def test_where_nothing_else_could_be_cut_allowing_it_does_not_help() -> None:
    graph = two_layers(hidden=6, other=6)
    with pytest.raises(ParametersError, match=r"Sizes that divide every layer: 2, 3, 6\. Data and pipeline"):
        allowed(graph, 4, (5, 16))


def test_a_weight_that_is_cut_with_another_region_is_not_missed() -> None:
    graph = parsed(
        "agraph (float[B,4] x, float[4,6] a, float[6,8] b, float[8,40] c) => (float[B,40] loss)"
        "{h = MatMul(x, a) i = Relu(h) j = MatMul(i, b) k = Relu(j) loss = MatMul(k, c)}",
        {"a": (4, 6), "b": (6, 8), "c": (8, 40)},
    )
    plan = planned(graph, 4, (5, 4))
    assert plan.regions == (("b", "c"),)
    assert plan.notes == ()


def test_weights_are_named_by_their_module_paths() -> None:
    graph = two_layers(6, 8)
    graph = dataclasses.replace(graph, known_as=WeightNames({"a": "net.up.weight", "b": "net.down.weight"}))
    assert "3 does not divide the 8 features of 'c' and 1 more" in refusal(graph, 3, (5, 16))
    assert "4 does not divide the 6 features of 'net.up.weight (a)' and 1 more" in refusal(graph, 4, (5, 16))
