"""Attention written out by the definition in float64 against the lowering, in every combination; gradients."""

from __future__ import annotations

import itertools
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto
from torch import Tensor

import onward
from onward.errors import NodeError
from tests.one_node import check_gradients, make_model, run

GENERATOR = torch.Generator().manual_seed(0)
BATCH, HEADS, GROUPS, QUERIES, KEYS, SIZE, VALUE = 2, 4, 2, 3, 5, 4, 2


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, bias: Tensor, scale: float, softcap: float
) -> Tensor:
    """(B, H, L, E): softmax of capped, biased scores over the allowed keys; nothing where there are none."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    weights = torch.exp(scores + bias) * allowed
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total.clamp(min=1e-300), 0.0) @ v


def allowed_keys(queries: int, keys: int, offset: Tensor, causal: bool, left: int, right: int) -> Tensor:
    place = torch.arange(queries).reshape(-1, 1) + offset.reshape(-1, 1, 1, 1)
    distance = place - torch.arange(keys)
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        allowed = allowed & (distance >= 0)
    if left >= 0:
        allowed = allowed & (distance <= left)
    if right >= 0:
        allowed = allowed & (-distance <= right)
    return allowed


MASKS: dict[str, Tensor | None] = {
    "none": None,
    "bool": torch.rand(QUERIES, KEYS, generator=GENERATOR) > 0.3,
    "bool4": torch.rand(BATCH, 1, QUERIES, KEYS, generator=GENERATOR) > 0.3,
    "float": normal(HEADS, QUERIES, KEYS),
    "short": torch.rand(QUERIES, KEYS - 1, generator=GENERATOR) > 0.2,
    "blind": torch.zeros(QUERIES, KEYS, dtype=torch.bool),
}
WINDOWS = [(-1, -1), (1, -1), (2, 1)]


@pytest.mark.parametrize("mask", list(MASKS))
@pytest.mark.parametrize(("causal", "window"), list(itertools.product([0, 1], WINDOWS)))
@pytest.mark.parametrize("softcap", [0.0, 0.75])
def test_masks_windows_and_softcap(mask: str, causal: int, window: tuple[int, int], softcap: float) -> None:
    q, k, v = normal(BATCH, HEADS, QUERIES, SIZE), normal(BATCH, GROUPS, KEYS, SIZE), normal(BATCH, GROUPS, KEYS, VALUE)
    attributes = {
        "is_causal": causal,
        "softcap": softcap,
        "left_window_size": window[0],
        "right_window_size": window[1],
    }
    given = MASKS[mask]
    inputs = {"Q": q, "K": k, "V": v, "attn_mask": given}
    model = make_model("Attention", inputs, attributes, 25)
    allowed = allowed_keys(QUERIES, KEYS, torch.zeros(1), bool(causal), *window)
    bias = torch.zeros(1, dtype=torch.float64)
    if given is not None and given.dtype == torch.bool:
        whole = torch.zeros(*given.shape[:-1], KEYS, dtype=torch.bool)
        whole[..., : given.shape[-1]] = given
        allowed = allowed & whole
    elif given is not None:
        bias = given
    expected = by_definition(q, k, v, allowed, bias, 1 / 2, softcap)
    tensors = [value for value in inputs.values() if value is not None]
    torch.testing.assert_close(run(model, *tensors), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("packed", [False, True])
def test_past_and_present(causal: int, packed: bool) -> None:
    past = 2
    q, k, v = normal(BATCH, HEADS, QUERIES, SIZE), normal(BATCH, GROUPS, 3, SIZE), normal(BATCH, GROUPS, 3, VALUE)
    past_key, past_value = normal(BATCH, GROUPS, past, SIZE), normal(BATCH, GROUPS, past, VALUE)
    tensors = [q, k, v]
    attributes: dict[str, Any] = {"is_causal": causal, "scale": 0.25}
    if packed:
        tensors = [t.transpose(1, 2).flatten(2) for t in tensors]
        attributes |= {"q_num_heads": HEADS, "kv_num_heads": GROUPS}
    names = ("Q", "K", "V")
    inputs = dict(zip(names, tensors, strict=True)) | {"m": None, "past_key": past_key, "past_value": past_value}
    for opset in (23, 24, 25):
        model = make_model("Attention", inputs, attributes, opset, output_count=3)
        result, key, value = run(model, *tensors, past_key, past_value)
        keys, values = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
        assert torch.equal(key, keys)
        assert torch.equal(value, values)
        allowed = allowed_keys(QUERIES, 5, torch.full((1,), past), bool(causal), -1, -1)
        expected = by_definition(q, keys, values, allowed, torch.zeros(1), 0.25, 0.0)
        expected = expected.transpose(1, 2).flatten(2) if packed else expected
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("causal", [0, 1])
def test_cache_outside(causal: int) -> None:
    """Each sample has its own number of filled keys; a sample with fewer keys than queries has rows of zeros."""
    lengths = torch.tensor([5, 2])
    q, k, v = normal(BATCH, HEADS, QUERIES, SIZE), normal(BATCH, GROUPS, KEYS, SIZE), normal(BATCH, GROUPS, KEYS, VALUE)
    inputs = {"Q": q, "K": k, "V": v, "m": None, "pk": None, "pv": None, "n": lengths}
    model = make_model("Attention", inputs, {"is_causal": causal}, 24)
    allowed = allowed_keys(QUERIES, KEYS, lengths - QUERIES, bool(causal), -1, -1)
    allowed = allowed & (torch.arange(KEYS) < lengths.reshape(-1, 1, 1, 1))
    result = run(model, q, k, v, lengths)
    torch.testing.assert_close(
        result, by_definition(q, k, v, allowed, torch.zeros(1), 0.5, 0.0), rtol=1e-10, atol=1e-12
    )
    assert (result[1, :, 0] == 0).all() == bool(causal)


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_scores_as_asked(mode: int) -> None:
    q, k, v = normal(1, 2, QUERIES, SIZE), normal(1, 2, KEYS, SIZE), normal(1, 2, KEYS, VALUE)
    bias = normal(QUERIES, KEYS)
    attributes = {"softcap": 0.5, "qk_matmul_output_mode": mode, "scale": 0.25}
    inputs = {"Q": q, "K": k, "V": v, "m": bias}
    scores = run(make_model("Attention", inputs, attributes, 23, output_count=4), q, k, v, bias)[3]
    raw = 0.25 * q @ k.transpose(-1, -2)
    capped = 0.5 * torch.tanh(raw / 0.5)
    expected = (raw, capped, capped + bias, torch.softmax(capped + bias, -1))[mode]
    torch.testing.assert_close(scores, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "attributes",
    [{}, {"is_causal": 1}, {"softcap": 0.5}, {"left_window_size": 1, "right_window_size": 0}, {"scale": 0.125}],
)
@pytest.mark.parametrize("mask", ["none", "bool", "blind", "float"])
def test_gradients(attributes: dict[str, Any], mask: str) -> None:
    """Also for the mask that is added, and through rows that see no key."""
    q, k, v = normal(1, 4, QUERIES, 2), normal(1, 2, KEYS, 2), normal(1, 2, KEYS, 2)
    given = MASKS[mask]
    inputs = {"Q": q, "K": k, "V": v, "m": given}
    model = make_model("Attention", inputs, attributes, 25)
    check_gradients(model, *(value for value in inputs.values() if value is not None))


def test_softmax_in_another_precision() -> None:
    q, k, v = (normal(1, 1, QUERIES, SIZE).float() for _ in range(3))
    attributes = {"softmax_precision": TensorProto.DOUBLE}
    result = run(make_model("Attention", {"Q": q, "K": k, "V": v}, attributes, 23), q, k, v)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, torch.nn.functional.scaled_dot_product_attention(q, k, v))


def test_bad_inputs_are_named() -> None:
    q = normal(1, 2, 3, 4)
    past = {"Q": q, "K": q, "V": q, "m": None, "past_key": q}
    with pytest.raises(NodeError, match="past_key and past_value go together"):
        run(make_model("Attention", past, opset=23), q, q, q, q)
    flat = normal(1, 3, 8)
    with pytest.raises(NodeError, match="rank 3 needs the attributes q_num_heads and kv_num_heads"):
        run(make_model("Attention", {"Q": flat, "K": flat, "V": flat}, opset=23), flat, flat, flat)


FLEX = """
<ir_version: 13, opset_import: ["" : 26, "ai.onnx.preview" : 1]>
flex (double[1,4,3,2] Q, double[1,2,5,2] K, double[1,2,5,3] V, double[3,5] bias) => (double[1,4,3,3] Y)
{
  Y = ai.onnx.preview.FlexAttention <
    softmax_precision = 11,
    score_mod = score (double[b,h,l,s] scores) => (double[b,h,l,s] out) { out = Add (scores, bias) },
    prob_mod = prob (double[b,h,l,s] probs) => (double[b,h,l,s] out) { out = Mul (probs, probs) }
  > (Q, K, V)
}
"""


def test_flex_attention_changes_scores_and_weights() -> None:
    """The nested graphs read a value of the outer graph, and gradients reach it."""
    model = onnx.parser.parse_model(FLEX)
    q, k, v, bias = normal(1, 4, 3, 2), normal(1, 2, 5, 2), normal(1, 2, 5, 3), normal(3, 5)
    keys, values = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    weights = torch.softmax(q @ keys.transpose(-1, -2) / 2**0.5 + bias, -1)
    torch.testing.assert_close(onward.to_torch(model)(q, k, v, bias), weights.square() @ values, rtol=1e-6, atol=1e-9)
    check_gradients(model, q, k, v, bias)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("rotated", [0, 4])
@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_rotary_embedding(interleaved: int, rotated: int, positions: bool, packed: bool) -> None:
    """A rotation is multiplication by a complex number of length 1."""
    batch, heads, length, size = 2, 3, 4, 6
    turned = rotated or size
    x = normal(batch, heads, length, size)
    angles = normal(7, turned // 2)
    ids = torch.tensor([[0, 1, 2, 3], [6, 5, 5, 0]])
    table = angles[ids] if not positions else angles
    part = x[..., :turned]
    pairs = part.unflatten(-1, (-1, 2)) if interleaved else torch.stack(part.chunk(2, -1), -1)
    spun = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(()).double(), angles[ids]).unsqueeze(1)
    both = torch.view_as_real(spun)
    moved = both.flatten(-2) if interleaved else torch.cat(both.unbind(-1), -1)
    expected = torch.cat([moved, x[..., turned:]], -1)
    attributes = {"interleaved": interleaved, "rotary_embedding_dim": rotated}
    if packed:
        x, expected = (t.transpose(1, 2).flatten(2) for t in (x, expected))
        attributes["num_heads"] = heads
    inputs = {"X": x, "cos": table.cos(), "sin": table.sin(), "ids": ids if positions else None}
    given = [value for value in inputs.values() if value is not None]
    model = make_model("RotaryEmbedding", inputs, attributes, 23)
    torch.testing.assert_close(run(model, *given), expected, rtol=1e-10, atol=1e-12)
    check_gradients(model, *given)


def test_rotary_embedding_names_what_does_not_fit() -> None:
    x, table = normal(1, 2, 3, 4), normal(1, 3, 3)
    with pytest.raises(NodeError, match="tables hold 3 angles; 4 rotated features need 2"):
        run(make_model("RotaryEmbedding", {"X": x, "c": table, "s": table}, opset=23), x, table, table)
    flat = normal(1, 3, 8)
    with pytest.raises(NodeError, match="rank 3 needs the attribute num_heads"):
        run(make_model("RotaryEmbedding", {"X": flat, "c": table, "s": table}, opset=23), flat, table, table)
