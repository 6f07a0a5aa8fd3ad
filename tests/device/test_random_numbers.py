"""Random numbers from counters, run by onnxruntime: repeatable, distributed as they should be, and independent."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from scipy import stats

from onward.device.random_numbers import draw_from_counters
from onward.errors import ModelError

SHAPE = (200, 500)


def drawn(nodes: str, outputs: str, *counters: tuple[int, int]) -> list[list[np.ndarray]]:
    """The outputs of a graph over `x` for each pair of seed and update."""
    model = ir.from_proto(
        onnx.parser.parse_model(
            f"""<ir_version: 9, opset_import: ["": 18]> g (float[n, m] x, int64 seed, int64 update) => ({outputs})
            <float ratio = {{0.25}}, bool on = {{1}}> {{ {nodes} }}"""
        )
    )
    inputs = {str(value.name): value for value in model.graph.inputs}
    assert draw_from_counters(model, [inputs["seed"], inputs["update"]])
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    x = np.ones(SHAPE, np.float32)
    return [
        session.run(None, {"x": x, "seed": np.array(seed, np.int64), "update": np.array(update, np.int64)})
        for seed, update in counters
    ]


def test_uniform_numbers() -> None:
    nodes = "a = RandomUniformLike(x) b = RandomUniformLike(x)"
    (a, b), again, (c, _), (d, _) = drawn(nodes, "float[n,m] a, float[n,m] b", (3, 7), (3, 7), (3, 8), (4, 7))
    assert np.array_equal(a, again[0])
    assert a.min() >= 0
    assert a.max() < 1
    assert stats.kstest(a.ravel(), "uniform").pvalue > 1e-3
    # Neighbours, the other node, the next update and the next seed: uncorrelated, and jointly uniform.
    size = a.size
    for one, other in ((a[:, 1:], a[:, :-1]), (a[1:], a[:-1]), (a, b), (a, c), (a, d)):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 4 / np.sqrt(size)
        table = np.histogram2d(one.ravel(), other.ravel(), bins=16, range=[[0, 1], [0, 1]])[0]
        assert stats.chisquare(table.ravel()).pvalue > 1e-4


def test_successive_updates_repeat_nothing() -> None:
    results = drawn("a = RandomUniformLike(x)", "float[n,m] a", *((0, update) for update in range(30)))
    first = np.stack([one[0].ravel()[:64] for one in results])
    assert np.abs(np.corrcoef(first) - np.eye(30)).max() < 5 / np.sqrt(64) + 0.05
    assert stats.kstest(first[:, 0], "uniform").pvalue > 1e-3


def test_normal_numbers() -> None:
    ((a,),) = drawn("a = RandomNormalLike <mean = 1.0, scale = 2.0> (x)", "float[n,m] a", (1, 2))
    assert stats.kstest(a.ravel(), "norm", (1.0, 2.0)).pvalue > 1e-3


def test_bernoulli_numbers_take_their_chances_from_the_input() -> None:
    ((a,),) = drawn("p = Mul(x, ratio) a = Bernoulli(p)", "float[n,m] a", (1, 2))
    assert set(np.unique(a)) == {0.0, 1.0}
    assert a.mean() == pytest.approx(0.25, abs=4 * np.sqrt(0.25 * 0.75 / a.size))


def test_dropout_scales_what_it_keeps() -> None:
    ((y, kept),) = drawn("y, kept = Dropout(x, ratio, on)", "float[n,m] y, bool[n,m] kept", (5, 0))
    assert np.array_equal(y, np.where(kept, np.float32(1 / 0.75), 0))
    assert kept.mean() == pytest.approx(0.75, abs=4 * np.sqrt(0.25 * 0.75 / y.size))


def test_what_cannot_be_repeated_is_refused() -> None:
    with pytest.raises(ModelError, match=r"random numbers with Multinomial, .* cannot repeat from a seed\. Remove"):
        drawn("a = Multinomial <dtype = 7> (x)", "int64[n,k] a", (0, 0))
