"""Inputs that hold keys and values of earlier tokens: which they are, and attention without them."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from onward.graph.repair.caches import attend_to_no_past, cached_axis


def graph_of(body: str, cache: str) -> ir.Graph:
    text = '<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]> g (float[n, 2, 3, 4] x'
    return ir.from_proto(onnx.parser.parse_model(f"{text}, {cache}) => (y) {{ {body} }}")).graph


@pytest.mark.parametrize(
    ("cache", "body", "axis"),
    [
        ("float[n, 2, past, 4] past_key", "y = Concat<axis = 2>(past_key, x)", 2),
        ("float[n, 2, past, 4] past_key", "y = Concat<axis = -2>(past_key, x)", 2),
        ("float[n, 2, past, 4] KeyCache", "y = Concat<axis = 2>(KeyCache, x)", 2),
        ("float[n, 2, past, 4] past", "y = com.microsoft.GroupQueryAttention(x, x, x, past)", 2),
        ("float[n, 2, 7, 4] past_key", "y = Concat<axis = 2>(past_key, x)", None),
        ("float[n, 2, past, 4] other", "y = Concat<axis = 2>(other, x)", None),
        ("float[n, 2, past, 4] past_key", "y = Concat<axis = 2>(x, past_key)", None),
        ("float[n, 2, past, 4] past_key", "y = Relu(past_key)", None),
    ],
)
def test_the_axis_of_tokens(cache: str, body: str, axis: int | None) -> None:
    assert cached_axis(graph_of(body, cache).inputs[1]) == axis


def test_a_cache_of_no_known_rank_is_none() -> None:
    assert cached_axis(ir.Value(name="past_key")) is None


def test_attention_goes_without_a_past_and_other_readers_stay() -> None:
    body = "a = com.microsoft.GroupQueryAttention(x, x, x, past) y = Relu(past)"
    graph = graph_of(body, "float[n, 2, past, 4] past")
    attend_to_no_past(graph.inputs[1])
    attention, other = graph
    assert attention.inputs[3] is None
    assert other.inputs[0] is graph.inputs[1]
