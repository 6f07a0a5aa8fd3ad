"""Sequences begin where what attention looks up is first computed with weights."""

from __future__ import annotations

from collections import Counter

from onward.plan.context.sequences import find_sequences
from onward.plan.horizontal.regions import PartitioningContext
from tests.parallel.context.test_layers import facts_of
from tests.parallel.horizontal_models import EXAMPLES


def test_sequences_begin_at_embeddings_and_are_those_of_attention() -> None:
    graph = EXAMPLES["bert-fused"].graph()
    facts = facts_of(EXAMPLES["bert-fused"], graph)
    found = find_sequences(PartitioningContext(graph, facts.shapes, facts.numbers), 2)
    producers = Counter((value.producer().op_type, cut.axis, cut.blocks) for value, cut in found.items())  # type: ignore[union-attr]
    assert producers == {("Gather", 1, (8,)): 2, ("Gather", 0, (8,)): 1}
    assert find_sequences(PartitioningContext(graph, facts.shapes, facts.numbers), 5) == {}
