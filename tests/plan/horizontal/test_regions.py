"""Regions that are sharded or not: alone, or instead of others."""

from __future__ import annotations

from tests.plan.horizontal.graphs import parsed, planned


def test_a_lone_column_cut_is_not_made() -> None:
    graph = parsed(
        "agraph (float[B,4] x, float[4,6] a, float[6,3] b, float[6,8] c) => (float[B,3] loss, float[B,8] other)"
        "{h = MatMul(x, a) r = Relu(h) loss = MatMul(r, b) other = MatMul(r, c)}",
        {"a": (4, 6), "b": (6, 3), "c": (6, 8)},
    )
    plan = planned(graph, 2, (5, 4))
    assert set(plan.shardings) >= {"a", "b"}
    lone = parsed(
        "agraph (float[B,4] x, float[4,6] a, float[6,3] b, float[4,8] c) => (float[B,3] loss)"
        "{h = MatMul(x, a) r = Relu(h) y = MatMul(r, b)"
        "d = MatMul(x, c) e = Abs(d) s = ReduceMax <keepdims=0> (e) loss = Add(y, s)}",
        {"a": (4, 6), "b": (6, 3), "c": (4, 8)},
    )
    plan = planned(lone, 2, (5, 4))
    assert set(plan.shardings) == {"a", "b"}
    assert "ReduceMax) needs all of its reduced axis at once" in plan.reasons["c"]


def test_clashing_cuts_are_chosen_by_what_they_save() -> None:
    graph = parsed(
        "agraph (float[B,4] x, float[4,6] a, float[6,8] b, float[8,40] c) => (float[B,40] loss)"
        "{h = MatMul(x, a) i = Relu(h) j = MatMul(i, b) k = Relu(j) loss = MatMul(k, c)}",
        {"a": (4, 6), "b": (6, 8), "c": (8, 40)},
    )
    plan = planned(graph, 2, (5, 4))
    assert plan.regions == (("b", "c"),)
    assert plan.reasons["a"] == "it could be sharded only instead of 'b', 'c', which hold more"
