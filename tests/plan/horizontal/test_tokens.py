"""Sharing by tokens: gradients that are summed, tokens that are gathered before they are mixed."""

from __future__ import annotations

import pytest

from onward.errors import ParametersError
from onward.lowering.building.shapes import find_value_facts
from onward.plan.horizontal.local_graph import localize
from onward.plan.horizontal.planning import plan_horizontal
from tests.plan.horizontal.graphs import gpt2, parsed


def test_shared_tokens_leave_the_gradients_of_norms_and_biases_to_be_added_up() -> None:
    graph = gpt2()
    facts = find_value_facts(graph, {"input_ids": (2, 8), "labels": (2, 8)})
    plan = plan_horizontal(graph, 2, facts.shapes, facts.numbers, sequence_parallel=True)
    between = {
        "h.0.attn.c_proj.bias",
        "h.0.mlp.c_proj.bias",
        *(f"h.0.ln_{i}.{w}" for i in (1, 2) for w in ("weight", "bias")),
    }
    assert set(plan.partial_gradients) == between | {"ln_f.weight", "ln_f.bias"}
    assert plan.token_axes["h.0/Add_output"] == 1
    types = [node.op_type for node in localize(graph, plan, 0).model.graph if node.domain == "onward.parallel"]
    assert types.count("ReduceScatter") == types.count("GatherTokens") == 3
    assert types.count("AllReduce") == types.count("Enter") == 0


def test_tokens_that_the_ranks_cannot_share_are_refused_where_sharing_was_asked_for() -> None:
    graph = gpt2()
    facts = find_value_facts(graph, {"input_ids": (2, 7), "labels": (2, 7)})
    with pytest.raises(ParametersError) as error:
        plan_horizontal(graph, 2, facts.shapes, facts.numbers, sequence_parallel=True)
    assert "distributed.sequence_parallel is true" in str(error.value)
    assert "their sums are of 7 tokens. Use sequences of a multiple of 2 tokens" in str(error.value)
    flat = parsed(
        "agraph (float[B,4] x, float[4,6] a, float[6,3] b) => (float[B,3] loss)"
        "{h = MatMul(x, a) r = Relu(h) loss = MatMul(r, b)}",
        {"a": (4, 6), "b": (6, 3)},
    )
    facts = find_value_facts(flat, {"x": (5, 4)})
    with pytest.raises(ParametersError, match="their sums have no axis of tokens"):
        plan_horizontal(flat, 2, facts.shapes, facts.numbers, sequence_parallel=True)


@pytest.mark.parametrize(
    "mixing", ["y = ReduceSum (m, tokens)", "y = Reshape (m, flat)"], ids=["summed over", "merged with the batch"]
)
def test_tokens_are_gathered_before_they_are_mixed(mixing: str) -> None:
    graph = parsed(
        "g (float[B,T,4] x, float[4,6] a, float[6,4] b) => (float loss)"
        "<int64[1] tokens = {1}, int64[2] flat = {-1, 4}>"
        f"{{h = MatMul(x, a) r = Relu(h) p = MatMul(r, b) m = Neg (p) {mixing} loss = ReduceSum <keepdims = 0> (y)}}",
        {"a": (4, 6), "b": (6, 4)},
    )
    facts = find_value_facts(graph, {"x": (2, 8, 4)})
    plan = plan_horizontal(graph, 2, facts.shapes, facts.numbers, sequence_parallel=True)
    assert plan.token_axes == {"p": 1, "m": 1}
    operators = [node.op_type for node in localize(graph, plan, 0).model.graph]
    assert operators.index("GatherTokens") == operators.index("Neg") + 1
