"""Shapes and shape arithmetic of a graph's values, found without computing it."""

import numpy as np
import pytest

from onward.errors import ModelError
from onward.graph.training_graph import make_training_graph
from onward.lowering.building.shapes import find_value_facts
from onward.models import create_model
from tests.graph.fusion.pairs import parse


def test_shapes_follow_from_those_of_the_inputs() -> None:
    model = create_model("gpt2", size="tiny", layers=1, heads=4, width=32, vocab_size=96, context_length=16)
    facts = find_value_facts(make_training_graph(model), {"input_ids": (3, 7)})
    assert facts.shapes["logits"] == (3, 7, 96)
    assert facts.shapes["h.0.attn/Softmax_output"] == (3, 4, 7, 7)
    assert facts.shapes["h.0.attn.c_attn.weight"] == (32, 96)
    assert facts.numbers["positions/Shape_output"] == (3, 7)
    assert facts.numbers["positions/Gather_output"] == 7


def test_a_missing_input_is_named() -> None:
    graph = make_training_graph(create_model("mnist"))
    with pytest.raises(ModelError, match="the shape of the input 'X' is missing"):
        find_value_facts(graph, {})


@pytest.mark.parametrize("cast", ["CastLike(zero, count)", "Cast<to=7>(zero)"])
def test_a_range_from_a_float_constant_is_shape_arithmetic(cast: str) -> None:
    """torch's exporter casts the 0.0 and 1.0 of `arange` to the type of its end."""
    stored = {"zero": np.array(0.0), "count": np.array(5), "one": np.array(1), "w": np.ones(5)}
    body = f"start = {cast}\nplaces = Range(start, count, one)\nseen = Cast<to=11>(places)\nz = Mul(x, w)\n"
    graph = make_training_graph(parse("double[b,5] x", "double[b,5] y", body + "y = Add(z, seen)", stored))
    facts = find_value_facts(graph, {"x": (2, 5)})
    assert facts.shapes["places"] == (5,)
    assert facts.numbers["places"] == (0, 1, 2, 3, 4)
