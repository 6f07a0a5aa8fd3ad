"""Sequences begin where what attention looks up is first computed with weights."""

from __future__ import annotations

from collections import Counter

import pytest

from onward.graph.training_graph import make_training_graph
from onward.lowering.building.shapes import find_value_facts
from onward.plan.context.cutting import plan_context
from onward.plan.context.sequences import find_products, find_sequences
from onward.plan.horizontal.regions import PartitioningContext
from tests.parallel.context.test_layers import facts_of
from tests.parallel.horizontal_models import EXAMPLES
from tests.plan.horizontal.graphs import parsed_model


def test_sequences_begin_at_embeddings_and_are_those_of_attention() -> None:
    graph = EXAMPLES["bert-fused"].graph()
    facts = facts_of(EXAMPLES["bert-fused"], graph)
    found = find_sequences(PartitioningContext(graph, facts.shapes, facts.numbers), 2)
    producers = Counter((value.producer().op_type, cut.axis, cut.blocks) for value, cut in found.items())  # type: ignore[union-attr]
    assert producers == {("Gather", 1, (8,)): 2, ("Gather", 0, (8,)): 1}
    assert find_sequences(PartitioningContext(graph, facts.shapes, facts.numbers), 5) == {}


PRODUCTS = {
    "queries first": ("s = MatMul (q, kt)  p = Softmax <axis = -1> (s)  y = MatMul (p, v)", (0, 1)),
    "keys first": ("s = MatMul (k, qt)  p = Softmax <axis = 1> (s)  y = MatMul (vt, p)", (1, 2)),
    "keys first, transposed": (
        "t = MatMul (k, qt)  s = Transpose <perm = [0, 2, 1]> (t)  p = Softmax <axis = -1> (s)  y = MatMul (p, v)",
        (1, 2),
    ),
    "einsum": (
        'z = Einsum <equation = "bqd,bkd->bkq"> (q, k)  s = Mul (z, half)  p = Softmax <axis = 1> (s)'
        '  y = Einsum <equation = "bkq,bkd->bqd"> (p, v)',
        (0, 1),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_queries_are_the_operand_that_the_softmax_is_not_over(name: str) -> None:
    """And attention stays cut by them: scores and all that follows are of a rank's own queries."""
    body, expected = PRODUCTS[name]
    text = (
        "g (float[B, 8, 4] x, float[4, 4] e, float[4, 4] a, float[4, 4] c) => (float[B, M, N] y) <float half = {0.5}> {"
        "h = MatMul (x, e)  q = MatMul (h, a)  k = MatMul (h, c)  v = Identity (k)"
        "  qt = Transpose <perm = [0, 2, 1]> (q)"
        f"  kt = Transpose <perm = [0, 2, 1]> (k)  vt = Transpose <perm = [0, 2, 1]> (v)  {body}}}"
    )
    graph = make_training_graph(parsed_model(text, dict.fromkeys("eac", (4, 4))), fuse=False)
    facts = find_value_facts(graph, {"x": (2, 8, 4)})
    partitioning = PartitioningContext(graph, facts.shapes, facts.numbers)
    assert list(find_products(partitioning).values()) == [expected]
    plan = plan_context(graph, 2, facts.shapes, facts.numbers)
    assert (plan.in_full, plan.lengths) == ({}, (8,))
    assert plan.share > 0.7, "all but keys and values, which are gathered"
