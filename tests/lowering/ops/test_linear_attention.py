"""LinearAttention against its recurrence in numpy, CausalConvWithState against a sum by hand; gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onward.errors import NodeError
from tests.one_node import check_gradients, make_model, run, to_array

RANDOM = np.random.default_rng(0)
BATCH, STEPS, KEY, VALUE = 2, 5, 3, 2


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape)


def by_recurrence(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, state: np.ndarray, decay: Any, beta: Any, heads: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """One sample, one head, one step at a time: the standard's four rules in one."""
    queries, groups = heads
    state = state.copy()
    output = np.zeros((BATCH, STEPS, queries, VALUE))
    for b, h, t in np.ndindex(BATCH, queries, STEPS):
        g = h // (queries // groups)
        key = k[b, t].reshape(groups, KEY)[g]
        value = v[b, t].reshape(groups, VALUE)[g]
        first_of_group = h % (queries // groups) == 0
        if first_of_group and t == 0:
            trail = [state[b, g]]
            for step in range(STEPS):
                s = trail[-1]
                key, value = k[b, step].reshape(groups, KEY)[g], v[b, step].reshape(groups, VALUE)[g]
                if decay is not None:
                    s = s * np.exp(decay[b, step].reshape(groups, -1)[g])[:, None]
                rate = 1.0 if beta is None else beta[b, step].reshape(-1)[g if beta.shape[-1] > 1 else 0]
                written = value if beta is None else rate * (value - s.T @ key)
                trail.append(s + np.outer(key, written))
            states[b, g] = trail
        output[b, t, h] = q[b, t].reshape(queries, KEY)[h] @ states[b, g][t + 1] / np.sqrt(KEY)
    last = np.stack([[states[b, g][-1] for g in range(groups)] for b in range(BATCH)])
    return output.reshape(BATCH, STEPS, -1), last


states: dict[tuple[int, int], list[np.ndarray]] = {}


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize("wide_decay", [False, True])
def test_linear_attention(rule: str, heads: tuple[int, int], wide_decay: bool) -> None:
    queries, groups = heads
    decay = -np.abs(normal(BATCH, STEPS, groups * (KEY if wide_decay else 1))) if "gated" in rule else None
    beta = RANDOM.uniform(0, 1, (BATCH, STEPS, 1 if wide_decay else groups)) if "delta" in rule else None
    inputs = {
        "query": normal(BATCH, STEPS, queries * KEY),
        "key": normal(BATCH, STEPS, groups * KEY) / 2,
        "value": normal(BATCH, STEPS, groups * VALUE),
        "past_state": normal(BATCH, groups, KEY, VALUE),
        "decay": decay,
        "beta": beta,
    }
    attributes = {"update_rule": rule, "q_num_heads": queries, "kv_num_heads": groups}
    model = make_model("LinearAttention", inputs, attributes, 27, output_count=2)
    given = [value for value in inputs.values() if value is not None]
    output, state = run(model, *given)
    q, k, v, past = given[:4]
    expected, last = by_recurrence(q, k, v, past, decay, beta, heads)
    np.testing.assert_allclose(to_array(output), expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(to_array(state), last, rtol=1e-10, atol=1e-12)
    if heads == (4, 2):
        check_gradients(model, *(value[:, :2] if value.ndim == 3 else value for value in given), outputs=(0, 1))


def test_rules_need_their_inputs() -> None:
    x = normal(1, 2, 2)
    attributes = {"update_rule": "gated", "q_num_heads": 1, "kv_num_heads": 1}
    with pytest.raises(NodeError, match="'gated' needs decay and takes no beta"):
        run(make_model("LinearAttention", {"q": x, "k": x, "v": x}, attributes, 27), x, x, x)


@pytest.mark.parametrize("activation", ["none", "silu", "swish"])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("length", [1, 4])
def test_causal_conv_with_state(activation: str, with_state: bool, length: int) -> None:
    channels, kernel = 3, 3
    x, weight, bias = normal(2, channels, length), normal(channels, 1, kernel), normal(channels)
    past = normal(2, channels, kernel - 1) if with_state else None
    before = np.zeros((2, channels, kernel - 1)) if past is None else past
    line = np.concatenate([before, x], -1)
    expected = np.stack([(line[..., t : t + kernel] * weight[:, 0]).sum(-1) + bias for t in range(length)], -1)
    if activation != "none":
        expected = expected / (1 + np.exp(-expected))
    inputs = {"x": x, "w": weight, "b": bias, "s": past}
    model = make_model("CausalConvWithState", inputs, {"activation": activation}, 27, output_count=2)
    given = [value for value in inputs.values() if value is not None]
    output, state = run(model, *given)
    np.testing.assert_allclose(to_array(output), expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_array_equal(to_array(state), line[..., -(kernel - 1) :])
    check_gradients(model, *given, outputs=(0, 1))
