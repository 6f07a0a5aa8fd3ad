"""Which weights can be pruned, and the axis that their elements are summed over."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onward.errors import ModelError
from onward.graph.pruning.prunable_weights import prunable_weights
from onward.graph.weights.names import WeightNames


def found(body: str, patterns: tuple[str, ...] = (), in_fours: bool = False, **shapes: tuple[int, ...]) -> Any:
    text = f'<ir_version: 8, opset_import: ["": 18]> g (float[n, 8] x, float[n, 8, 5, 5] i) => (y) {{ {body} }}'
    proto = onnx.parser.parse_model(text)
    for name, shape in shapes.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), name))
    graph = ir.from_proto(proto).graph
    return prunable_weights(graph, list(shapes), patterns, WeightNames({}), in_fours)


@pytest.mark.parametrize(
    ("body", "shape", "axis"),
    [
        ("y = MatMul(x, w)", (8, 4), 0),
        ("y = Gemm(x, w)", (8, 4), 0),
        ("y = Gemm<transB = 1>(x, w)", (4, 8), 1),
        ("t = Transpose(w) y = MatMul(x, t)", (4, 8), 1),
        ("t = Transpose<perm = [1, 0]>(w) c = Cast<to = 1>(t) y = MatMul(x, c)", (4, 8), 1),
        ("y = Conv(i, w)", (4, 8, 1, 1), 1),
    ],
)
def test_the_axis_that_is_summed_over(body: str, shape: tuple[int, ...], axis: int) -> None:
    axes, notes = found(body, w=shape)
    assert axes == {"w": axis}
    assert notes[0].startswith("pruning: 1 of 1 weights (")


def test_what_no_sum_reads_stays_unless_it_is_named() -> None:
    body = "a = MatMul(x, w) b = Add(a, bias) e = Gather(table, x) y = Mul(b, e)"
    shapes = {"w": (8, 4), "bias": (4,), "table": (9, 4)}
    assert set(found(body, **shapes)[0]) == {"w"}
    assert found(body, ("table",), **shapes)[0] == {"table": 0}
    both = "a = MatMul(x, w) t = Transpose(w) b = MatMul(x, t) y = Add(a, b)"
    with pytest.raises(ModelError, match=r"no trainable weight can be pruned\. Remove it, or name weights in pruning"):
        found(both, w=(8, 8))


def test_sums_over_a_multiple_of_four() -> None:
    assert found("y = MatMul(x, w)", in_fours=True, w=(8, 3))[0] == {"w": 0}
    with pytest.raises(ModelError, match=r"pruned: 'w' do not sum over a multiple of four elements\. Remove it"):
        found("y = MatMul(x, w)", in_fours=True, w=(6, 4))
    axes, notes = found("a = MatMul(x, w) y = MatMul(a, v)", in_fours=True, w=(8, 6), v=(6, 2))
    assert axes == {"w": 0}
    assert notes[1] == "pruning: 'v' stays dense: no sum over a multiple of four elements."


def test_a_pattern_that_matches_nothing() -> None:
    with pytest.raises(
        ModelError,
        match=r"pruning\.weights: 'none\*' matches none of the 1 trainable weights\. They are .* lists them\.$",
    ):
        found("y = MatMul(x, w)", ("none*",), w=(8, 4))
