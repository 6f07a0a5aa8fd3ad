"""What compiled code saves is counted in the bytes that joined operators pass on through memory."""

from __future__ import annotations

import numpy as np
import pytest

from onward.engine.building.graph_costs import traced_costs
from onward.engine.network import compilation_gain
from onward.engine.network.compilation_gain import CompilationGain
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import TrainingGraph, make_training_graph
from tests.graph.fusion.pairs import parse

ROWS, WIDTH = 1000, 8
VALUE = ROWS * WIDTH * 4
"""Bytes of a value."""
SECONDS_A_BYTE = 3 * 20 / 1.5e11
"""Three passes over memory, each byte as dear as 20 operations."""


def make_graph(body: str) -> TrainingGraph:
    """Of the loss `mean(y)`, with `h` a linear layer's output."""
    stored = {
        "w": np.ones((WIDTH, WIDTH), np.float32),
        "s": np.ones(WIDTH, np.float32),
        "axis": np.asarray(1),
        "last": np.asarray([2]),
        "depthwise": np.ones((WIDTH, 1, 1), np.float32),
        "wide": np.ones((WIDTH, WIDTH, 1), np.float32),
    }
    model = parse(f"float[n,{WIDTH}] x", f"float[n,{WIDTH}] y", f"h = MatMul(x, w)\n{body}", stored, opset=23)
    spec = LossSpec(type="mean_squared_error", prediction="y", label="labels")
    return make_training_graph(model, loss=spec, weights_to_train=["w"], fuse=False)


def estimate_gain(graph: TrainingGraph, sizes: dict[str, int]) -> CompilationGain:
    return compilation_gain.estimate_gain(graph, traced_costs(graph, sizes))


def gain_over(body: str, plain: str) -> float:
    """Bytes of a pass forward that are saved in one graph, less those in another."""
    gains: list[CompilationGain] = [estimate_gain(make_graph(one), {"n": ROWS}) for one in (body, plain)]
    return (gains[0].saved_seconds - gains[1].saved_seconds) / SECONDS_A_BYTE


def test_an_operator_more_in_a_chain_saves_a_write_and_a_read() -> None:
    assert gain_over("a = Sin(h)\nb = Cos(a)\ny = Exp(b)", "a = Sin(h)\ny = Exp(a)") == pytest.approx(2 * VALUE)


def test_a_matmul_between_operators_parts_them() -> None:
    parted = "a = Sin(h)\nb = MatMul(a, w)\ny = Exp(b)"
    assert gain_over(parted, "a = Sin(h)\ny = Exp(a)") == pytest.approx(-2 * VALUE)


def test_what_torch_computes_by_three_kernels_saves_two() -> None:
    read_and_written = 2 * VALUE + WIDTH * 4
    saved = gain_over("y = RMSNormalization(h, s)", "y = LayerNormalization(h, s)")
    assert saved == pytest.approx(2 * read_and_written)


@pytest.mark.parametrize(
    ("last", "slower"),
    [
        ("y = CumSum(a, axis)", set()),
        ("y = Softmax(a)", set()),
        ("b = Mul(a, s)\ny = Exp(b)", set()),
        ("b = Transpose(a)\nc = Exp(b)\ny = Transpose(c)", set()),
        ("b = Unsqueeze(a, last)\nc = Conv<group = 8>(b, depthwise)\ny = Squeeze(c, last)", {"Conv"}),
        ("b = Unsqueeze(a, last)\nc = Conv(b, wide)\ny = Squeeze(c, last)", set()),
        ("y = Exp(a)", set()),
    ],
    ids=[
        "running sum",
        "softmax",
        "factor",
        "read by columns",
        "depthwise",
        "wide",
        "none",
    ],
)
def test_what_is_slower_compiled_is_named(last: str, slower: set[str]) -> None:
    gain = estimate_gain(make_graph(f"a = Sin(h)\n{last}"), {"n": ROWS})
    assert {*gain.slower_seconds} == slower
    assert bool(slower) == (0 < gain.slower_share < 1)


def test_a_graph_without_nodes_saves_nothing() -> None:
    gain = CompilationGain(0.0, 0.0, {})
    assert (gain.saved_share, gain.slower_share) == (0.0, 0.0)
