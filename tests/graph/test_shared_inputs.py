"""Which linear layers read the same, and how the user hears of it."""

from __future__ import annotations

import numpy as np
import pytest

from onward.graph.inspection.facts import inspect
from onward.graph.inspection.text import render
from onward.graph.shared_inputs import layers_that_read_the_same, note_on_joined
from onward.graph.training_graph import make_training_graph
from onward.models import create_model
from tests.graph.fusion.pairs import parse

SIZE = {"size": "tiny", "layers": 2, "width": 16, "heads": 2, "vocab_size": 32, "context_length": 8}


@pytest.mark.parametrize("fuse", [False, True])
def test_queries_keys_and_values_of_a_bert(fuse: bool) -> None:
    graph = make_training_graph(create_model("bert", **SIZE), fuse=fuse)
    groups = layers_that_read_the_same(graph.model.graph, graph.weights)
    assert [len(group) for group in groups] == [3, 3]
    assert note_on_joined(groups) == (
        "speed.join_layers: 6 linear layers with the same input as others are computed in 2 groups, with one sum of "
        "gradients each.",
    )
    assert note_on_joined(()) == ()


def test_inspection_lists_them() -> None:
    text = render(inspect(create_model("bert", **SIZE)))
    assert "Linear layers with the same input, computed together in training unless speed.join_layers is false" in text
    assert "  2  groups of 3  such as " in text
    assert "Linear layers with the same input" not in render(inspect(create_model("gpt2", **SIZE)))


def test_a_product_between_keeps_them_apart() -> None:
    tensors = {name: np.ones((4, 4), np.float32) * (index + 1) for index, name in enumerate(("a", "b", "c"))}
    body = "p = MatMul(x, a)\nt = Transpose<perm=[1,0]>(b)\nq = MatMul(x, t)\nr = MatMul(q, p)\ns = MatMul(x, c)"
    graph = make_training_graph(parse("float[4,4] x", "float[4,4] r, float[4,4] s", body, tensors))
    assert layers_that_read_the_same(graph.model.graph, graph.weights) == (("p", "q"),)
