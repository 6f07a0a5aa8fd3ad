"""Initializers without a gradient: asking for one by name is an error."""

from __future__ import annotations

import pytest

from onward.errors import ModelError
from onward.graph.training_graph import make_training_graph
from tests.graph.weights.models_in_text import model_of, normal


def test_no_gradient():
    """Indices, comparisons, casts to integers, conditions, unread tensors; asking for one by name is an error."""
    model = model_of(
        """(float[N, 4] x, int64[N] i) => (float[N, 4] y, bool[N, 4] z)
        { a = Gather(table, i) b = Add(a, shift) y = Add(b, x) z = Greater(y, limit)
          k = Cast<to = 7>(number) l = Cast<to = 1>(k) }""",
        table=normal(5, 4), shift=normal(4), limit=normal(4), number=normal(4), alone=normal(4),
    )  # fmt: skip
    graph = make_training_graph(model)
    assert graph.weights == ("table", "shift")
    assert graph.frozen == {
        "limit": "no gradient reaches it", "number": "no gradient reaches it", "alone": "no node reads it",
    }  # fmt: skip
    with pytest.raises(
        ModelError, match=r"training\.weights_to_train names 'limit', but no gradient of the loss reaches it"
    ):
        make_training_graph(model, weights_to_train=["limit"])
