"""What compiled code saves is counted in the bytes that joined operators pass on through memory."""

from __future__ import annotations

import itertools

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
        "first": np.asarray([1]),
        "depthwise": np.ones((WIDTH, 1, 1), np.float32),
        "single": np.ones((1, 1, 1), np.float32),
        "image": np.asarray([1, 2]),
        "small": np.ones((1, 1, 1, 1), np.float32),
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


def test_normalizations_are_joined_with_what_follows() -> None:
    plain, body = "y = Exp(h)", "c = Unsqueeze(h, last)\nb = {}\na = Squeeze(b, last)\ny = Exp(a)"
    nodes = ("InstanceNormalization(c, s, s)", "BatchNormalization(c, s, s, s, s)", "MaxPool<kernel_shape = [1]>(c)")
    saved = [gain_over(body.format(one), plain) for one in nodes]
    assert min(saved[:2]) > VALUE > saved[2] == 0.0


def test_what_only_renames_elements_parts_nothing() -> None:
    """Where its elements are read by something else, too, they are written once."""
    plain = "a = Sin(h)\ny = Exp(a)"
    seen = "a = Sin(h)\nb = Unsqueeze(a, last)\nc = Transpose<perm = [0, 2, 1]>(b)\nd = Squeeze(c, first)\ny = Exp(d)"
    assert gain_over(seen, plain) == 0.0
    read = f"{seen.removesuffix('y = Exp(d)')}e = Exp(d)\ng = MatMul(d, w)\ny = Add(e, g)"
    assert gain_over(read, "a = Sin(h)\ne = Exp(a)\ng = MatMul(a, w)\ny = Add(e, g)") == 0.0


def test_a_long_chain_of_views_is_one_value() -> None:
    """Longer than Python's calls may be deep."""
    names = ["a", *(f"v{index}" for index in range(2000))]
    chain = "".join(f"{new} = Transpose<perm = [0, 1]>({old})\n" for old, new in itertools.pairwise(names))
    found = gain_over(f"a = Sin(h)\n{chain}y = Exp({names[-1]})", "a = Sin(h)\ny = Exp(a)")
    assert found == 0.0


def test_a_view_of_a_result_is_no_write_of_its_own() -> None:
    whole = "a = Sin(h)\nb = Unsqueeze(a, last)\nc = Squeeze(b, last)\nd = MatMul(c, w)\ny = Exp(d)"
    assert gain_over(whole, "a = Sin(h)\nd = MatMul(a, w)\ny = Exp(d)") == 0.0


@pytest.mark.parametrize(
    ("convolution", "lost"),
    [
        ("Conv<group = 8>(b, depthwise)", 0.0),
        ("Conv(b, wide)", 0.0),
        ("Conv(b, single)", 2.5),
        ("ConvTranspose(b, single)", 2.5),
        ("Conv(b, small)", 0.0),
    ],
)
def test_convolutions_lose_where_channels_are_few(convolution: str, lost: float) -> None:
    """Of the time of one: a second behind the first takes that, and saves nothing. Of images of few pixels nothing is
    lost.
    """
    axis = {"single": "first", "small": "image"}.get(convolution.split()[-1].rstrip(")"), "last")
    chain = "\n".join(f"e{index + 1} = Sin(e{index})" for index in range(50))
    body = f"b = Unsqueeze(h, {axis})\n{{}}e0 = Squeeze(b{{}}, {axis})\n{chain}\ny = Exp(e50)"
    first, second = f"b1 = {convolution}\n", f"b2 = {convolution.replace('(b', '(b1')}\n"
    one = estimate_gain(make_graph(body.format(first, 1)), {"n": ROWS})
    two = estimate_gain(make_graph(body.format(first + second, 2)), {"n": ROWS})
    assert (one.saved_seconds - two.saved_seconds) / (two.seconds - one.seconds) == pytest.approx(lost)


def test_a_graph_without_nodes_saves_nothing() -> None:
    assert CompilationGain(0.0, 0.0, 9.0).saved_share == 0.0


def compiling_seconds(body: str) -> float:
    return estimate_gain(make_graph(body), {"n": ROWS}).compiling_seconds


def test_the_compiler_takes_time_for_each_kind_of_node() -> None:
    """The same operator on the same shapes with the same attributes is compiled once, as in repeated layers."""
    once = compiling_seconds("a = Sin(h)\ny = LeakyRelu<alpha=0.5>(a)")
    assert compiling_seconds("b = Sin(h)\na = Sin(b)\ny = LeakyRelu<alpha=0.5>(a)") == once
    other_attribute = "b = LeakyRelu<alpha=0.25>(h)\na = Sin(b)\ny = LeakyRelu<alpha=0.5>(a)"
    assert compiling_seconds(other_attribute) - once == pytest.approx(0.15)
    other_shape = "b = Unsqueeze(h, axis)\nc = Sin(b)\nd = Squeeze(c, axis)\na = Sin(d)\ny = LeakyRelu<alpha=0.5>(a)"
    assert compiling_seconds(other_shape) - once == pytest.approx(3 * 0.15)


def test_the_compiler_takes_longest_for_convolutions() -> None:
    """Each one, also where they are alike."""
    body = "b0 = Unsqueeze(h, last)\n{}y = Squeeze(b{}, last)"
    convolutions = [f"b{n + 1} = Conv(b{n}, wide)\n" for n in range(2)]
    one, two = (compiling_seconds(body.format("".join(convolutions[:n]), n)) for n in (1, 2))
    assert two - one == pytest.approx(1.0)
