"""Which sequences a plan finds, and what it puts into the graph; what ranks compute with it: tests/parallel."""

from __future__ import annotations

from collections import Counter

import pytest

from onward.errors import ParametersError
from onward.plan.context.cutting import plan_context
from tests.parallel.context.test_layers import facts_of
from tests.parallel.horizontal_models import EXAMPLES


def test_a_layer_costs_one_attention_and_a_loss_two_sums() -> None:
    example = EXAMPLES["gpt2-fused"]
    graph = example.graph()
    facts = facts_of(example, graph)
    plan = plan_context(graph, 2, facts.shapes, facts.numbers)
    types = Counter(node.op_type for node in plan.of(graph).model.graph if node.domain == "onward.parallel")
    assert types["ContextAttention"] == 2
    assert (types["ContextMeanLoss"], types["ContextSum"], types["ContextGather"]) == (1, 1, 1)
    assert not any(node.domain == "onward.parallel" for node in graph.model.graph)
    names = [value.name for value in graph.model.graph.outputs]
    assert [value.name for value in plan.of(graph).model.graph.outputs] == names
    assert plan.notes == (
        "context parallelism: 2 ranks share sequences of 8 tokens; 100% of the activations' elements are cut.",
    )


def test_one_rank_computes_the_graph_as_it_is() -> None:
    graph = EXAMPLES["mnist"].graph()
    assert plan_context(graph, 1, {}, {}).of(graph) is graph


def test_a_model_without_attention_is_refused() -> None:
    graph = EXAMPLES["mnist"].graph()
    facts = facts_of(EXAMPLES["mnist"], graph)
    with pytest.raises(
        ParametersError, match=r"context_parallel_size is 2, but the model has neither attention over at .*4"
    ):
        plan_context(graph, 2, facts.shapes, facts.numbers)
