"""Tables of signal processing: told by name, or by numbers."""

from __future__ import annotations

import numpy as np
import pytest

from onward.graph.training_graph import make_training_graph
from tests.graph.weights.models_in_text import hann, model_of, normal


def fourier(length: int) -> np.ndarray:
    """The rows of an STFT: cosines, then sines, under a window."""
    angles = 2 * np.pi * np.outer(np.arange(length // 2 + 1), np.arange(length)) / length
    return (np.concatenate([np.cos(angles), np.sin(angles)]) * hann(length)).astype(np.float32)


def constant_q(length: int) -> np.ndarray:
    """Kernels of frequencies a third of an octave apart, each as long as its frequency asks."""
    rows = []
    for octave in np.arange(0, 4, 1 / 3):
        size = int(length / 2 ** (octave / 2))
        row, begin = np.zeros(length), (length - size) // 2
        row[begin : begin + size] = hann(size) * np.cos(2 * np.pi * 6 * 2**octave * np.arange(size) / length)
        rows.append(row)
    return np.array(rows, np.float32)


def mel(filters: int, bins: int) -> np.ndarray:
    edges = np.geomspace(2, bins, filters + 2)
    places = np.arange(bins)[:, None]
    up = (places - edges[:-2]) / (edges[1:-1] - edges[:-2])
    down = (edges[2:] - places) / (edges[2:] - edges[1:-1])
    return np.maximum(0, np.minimum(up, down)).astype(np.float32)


@pytest.mark.parametrize("named", [True, False], ids=["by name", "by numbers"])
def test_signal_tables_do_not_train(named: bool) -> None:
    tables = ("stft__forward_basis_buffer", "mel__melscale__fb") if named else ("val_3", "val_9")
    model = model_of(
        f"""(float[N, 1, 512] x) => (float[N, 3, 4] y)
        {{ s = Conv<strides = [128]>(x, {tables[0]})  p = Mul(s, s)  t = Transpose<perm = [0, 2, 1]>(p)
           m = MatMul(t, {tables[1]})  l = MatMul(m, head)  y = Add(l, bias) }}""",
        **{tables[0]: fourier(256)[:, None], tables[1]: np.tile(mel(20, 129), (2, 1))[:258] if named else mel(20, 258)},
        head=normal(20, 4), bias=normal(4),
    )  # fmt: skip
    graph = make_training_graph(model)
    assert graph.weights == ("head", "bias")
    reasons = [graph.frozen[name.replace("__", ".")] for name in tables]
    if named:
        assert set(reasons) == {"a table of signal processing by its name"}
    else:
        assert reasons == ["a table of sines and cosines (a Fourier transform)", "a bank of triangular filters (mel)"]
    exact = tables[0].replace("__", ".")
    assert exact in make_training_graph(model, weights_to_train=[exact, "head"]).weights


@pytest.mark.parametrize(
    ("array", "table"),
    [
        (fourier(128)[:, None], True),
        (constant_q(1024)[:, None], True),
        (normal(64, 1, 128), False),
        (np.eye(128, dtype=np.float32)[:, None], False),
        (np.abs(normal(64, 1, 256)), False),
        (np.cumsum(normal(64, 1, 256), -1), False),
        (np.maximum(0, normal(64, 1, 256) - 1.2).astype(np.float32), False),
        (np.full((64, 1, 128), 0.02, np.float32), False),
        (np.repeat(fourier(128)[4:5, None], 64, 0), False),
    ],
    ids=["stft", "constant q", "random", "identity", "positive", "smooth", "sparse", "one number", "one frequency"],
)
def test_which_numbers_are_a_signal_table(array: np.ndarray, table: bool) -> None:
    model = model_of("(float[N, 1, L] x) => (float[N, C, M] y) { y = Conv(x, w) }", w=array.astype(np.float32))
    assert make_training_graph(model).weights == (() if table else ("w",))


def positions(rows: int, width: int, interleaved: bool = True, padding: int | None = None) -> np.ndarray:
    """Sines and cosines of positions in turns, or in halves as RoFormer and Marian have them."""
    angles = np.arange(rows)[:, None] / 10000 ** (np.arange(width // 2) * 2 / width)
    pairs = np.stack([np.sin(angles), np.cos(angles)], -1 if interleaved else 1).reshape(rows, -1)
    if padding is not None:
        pairs[padding] = 0
    return pairs.astype(np.float32)


@pytest.mark.parametrize(
    ("table", "is_fixed"),
    [
        (positions(32, 16), True),
        (positions(32, 16, interleaved=False), True),
        (positions(40, 16, padding=1), True),
        (positions(32, 16)[None], True),
        (positions(32, 16)[:, None], True),
        (positions(32, 16) + normal(32, 16) * 0.01, False),
        (normal(32, 16) / 4, False),
        (np.cumsum(normal(32, 16), 0) / 40, False),
        (np.ones((32, 16)) * 0.7071, False),
        (np.eye(16), False),
        (np.zeros((32, 16)), False),
    ],
    ids=[
        "pairs", "halves", "padding", "batch first", "batch second", "fine-tuned", "random", "smooth", "one number",
        "identity", "zeros",
    ],
)  # fmt: skip
def test_tables_of_positions_do_not_train(table: np.ndarray, is_fixed: bool) -> None:
    model = model_of(
        "(int64[N] place) => (float[A, B, C] y) { r = Gather(t, place)  y = MatMul(r, w) }",
        t=table.astype(np.float32),
        w=normal(table.shape[-1], 4),
    )
    graph = make_training_graph(model)
    assert graph.weights == (("w",) if is_fixed else ("t", "w"))
    if is_fixed:
        assert graph.frozen["t"] == "sines and cosines of positions"
        assert make_training_graph(model, weights_to_train=["t", "w"]).weights == ("t", "w")
