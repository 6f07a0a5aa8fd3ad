"""What speaks against an initializer being a weight: place, numbers, names."""

from __future__ import annotations

import numpy as np

from onward.graph.training_graph import make_training_graph
from tests.graph.weights.models_in_text import model_of, normal, two_layers


def test_immutable_weights():
    """The original's rule: a rank-0 constant of this value at this input of this operator."""
    listed = {"Mul": [(1, 0.5)], "Add": [(1, 1e-5)]}
    graph = make_training_graph(two_layers(), weights_to_train=["half", "first.weight"], immutable_weights=listed)
    assert graph.weights == ("first.weight",)
    assert graph.frozen["half"] == "listed in immutable_weights: Mul, input 1, 0.5"
    other = {"Mul": [(0, 0.5), (1, 0.25)]}
    assert "half" in make_training_graph(two_layers(), weights_to_train=["half"], immutable_weights=other).weights


def test_constants_by_their_place_and_numbers():
    """Masks, triangles, one-element factors, initial states, tables of angles."""
    causal = np.triu(np.full((4, 4), -np.inf, np.float32), 1)
    model = model_of(
        """(float[N, 4] x, float[S, B, 4] q) => (float[N, 4] y, float[S, 1, B, 3] r)
        { a = Add(x, mask) b = MatMul(a, triangle) c = Div(b, scale) y = MatMul(c, w)
          r = GRU<hidden_size = 3>(q, gw, gr, gb, , h0) }""",
        mask=causal, triangle=np.tril(np.ones((4, 4), np.float32)), scale=normal(1), w=normal(4, 4),
        gw=normal(1, 9, 4), gr=normal(1, 9, 3), gb=normal(1, 18), h0=np.zeros((1, 2, 3), np.float32),
    )  # fmt: skip
    graph = make_training_graph(model)
    assert graph.weights == ("w", "gw", "gr", "gb")
    assert graph.frozen == {
        "mask": "a mask", "triangle": "a mask", "scale": "a one-element constant of the arithmetic",
        "h0": "an initial state of zeros",
    }  # fmt: skip


def test_old_torch_exports():
    """torch's older exporter keeps names: rank-0 and one-element parameters train, buffers and constants do not."""
    model = model_of(
        """(float[N, 4] x) => (float[N, 4] y)
        { k = Constant<value = float[4] {1.0, 2.0, 3.0, 4.0}>()
          a = Mul(x, logit_scale) b = Div(a, temperature) c = Add(b, k) d = Mul(c, attn__mask) y = Sub(d, h0) }""",
        producer="pytorch", logit_scale=np.float32(2.0), temperature=np.float32([3.0]), attn__mask=normal(4),
        h0=normal(4),
    )  # fmt: skip
    graph = make_training_graph(model)
    assert graph.weights == ("logit_scale", "temperature", "h0")
    assert graph.frozen == {"attn.mask": "a buffer by its name", "k": "a Constant node of torch's exporter"}
