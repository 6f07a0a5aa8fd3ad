"""Attention operators of com.microsoft equal onnxruntime's CPU kernels; gradients by finite differences in float64."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from onward.errors import NodeError
from tests.one_node import (
    check_against_onnxruntime,
    check_gradients,
    make_model,
    normal,
    run,
    run_onnxruntime,
    to_array,
)

RANDOM = np.random.default_rng(0)
_draw = functools.partial(normal(RANDOM), spread=0.7)
MICROSOFT = "com.microsoft"
B, L, N, D = 2, 4, 2, 3
H = N * D


def _check(
    op_type: str, inputs: dict[str, Any], attributes: dict[str, Any], outputs: int = 1, gradients: bool = True
) -> None:
    given = {name: value for name, value in inputs.items() if value is not None}
    model = make_model(op_type, inputs, attributes, 20, outputs, domain=MICROSOFT)
    check_against_onnxruntime(model, *given.values(), rtol=1e-4, atol=1e-5)
    if not gradients:
        return
    wide = {n: v.astype(float) if v is not None and v.dtype == np.float32 else v for n, v in inputs.items()}
    model = make_model(op_type, wide, attributes, 20, outputs, domain=MICROSOFT)
    check_gradients(model, *(v for v in wide.values() if v is not None), outputs=range(outputs))


MASKS = {
    "none": None,
    "lengths": np.array([4, 2], np.int32),
    "ends and starts": np.array([4, 3, 0, 1], np.int32),
    "keys": np.array([[1, 1, 1, 1], [1, 1, 0, 0]], np.int32),
    "queries and keys": np.tril(np.ones((B, L, L), np.int32)),
}


@pytest.mark.parametrize("mask", list(MASKS))
@pytest.mark.parametrize("causal", [0, 1])
def test_attention_with_its_projection(causal: int, mask: str) -> None:
    inputs = {"input": _draw(B, L, 5), "weights": _draw(5, 3 * H), "bias": _draw(3 * H), "mask_index": MASKS[mask]}
    _check("Attention", inputs, {"num_heads": N, "unidirectional": causal}, gradients=mask in ("none", "keys"))


def test_attention_with_bias_of_the_scores_a_scale_and_other_sizes() -> None:
    inputs = {
        "input": _draw(B, L, 5),
        "weights": _draw(5, 2 * H + 4),
        "bias": _draw(2 * H + 4),
        "mask_index": None,
        "past": None,
        "attention_bias": _draw(1, N, L, L),
    }
    _check("Attention", inputs, {"num_heads": N, "qkv_hidden_sizes": [H, H, 4], "scale": 0.3})


@pytest.mark.parametrize("causal", [0, 1])
def test_attention_with_a_past(causal: int) -> None:
    inputs = {
        "input": _draw(B, L, 5),
        "weights": _draw(5, 3 * H),
        "bias": _draw(3 * H),
        "mask_index": None,
        "past": _draw(2, B, N, 3, D),
    }
    _check("Attention", inputs, {"num_heads": N, "unidirectional": causal}, outputs=2)


@pytest.mark.parametrize("mask", ["none", "lengths", "keys", "queries and keys"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("causal", [0, 1])
def test_multi_head_attention(causal: int, bias: bool, mask: str) -> None:
    inputs = {
        "query": _draw(B, L, H),
        "key": _draw(B, L, H),
        "value": _draw(B, L, H),
        "bias": _draw(3 * H) if bias else None,
        "key_padding_mask": MASKS[mask],
    }
    gradients = mask in ("none", "keys")
    _check("MultiHeadAttention", inputs, {"num_heads": N, "unidirectional": causal}, gradients=gradients)


def test_multi_head_attention_over_another_sequence_with_a_past() -> None:
    inputs = {
        "query": _draw(B, L, H),
        "key": _draw(B, 3, H),
        "value": _draw(B, 3, H),
        "bias": None,
        "key_padding_mask": None,
        "attention_bias": _draw(B, 1, L, 5),
        "past_key": _draw(B, N, 2, D),
        "past_value": _draw(B, N, 2, D),
    }
    _check("MultiHeadAttention", inputs, {"num_heads": N, "scale": 0.4}, outputs=3)


def test_multi_head_attention_of_keys_in_heads() -> None:
    inputs = {"query": _draw(B, L, H), "key": _draw(B, N, 3, D), "value": _draw(B, N, 3, D)}
    _check("MultiHeadAttention", inputs, {"num_heads": N})


def test_packed_forms_are_the_parts_side_by_side() -> None:
    """onnxruntime has them for CUDA only."""
    q, k, v = (torch.from_numpy(_draw(B, L, N, D)) for _ in range(3))
    flat = {"query": q.flatten(2), "key": k.flatten(2), "value": v.flatten(2)}
    attributes = {"num_heads": N}
    expected = run(make_model("MultiHeadAttention", flat, attributes, 20, domain=MICROSOFT), *flat.values())
    packed = {"query": torch.stack([q, k, v], 3)}
    actual = run(make_model("MultiHeadAttention", packed, attributes, 20, domain=MICROSOFT), *packed.values())
    torch.testing.assert_close(actual, expected)
    packed = {"query": q.flatten(2), "key": torch.stack([k, v], 3)}
    actual = run(make_model("MultiHeadAttention", packed, attributes, 20, domain=MICROSOFT), *packed.values())
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("positions", [np.array([2], np.int64), np.array([[0, 3, 1, 2], [5, 4, 2, 1]], np.int64)])
def test_rotary_embedding(positions: Any, heads_first: bool, interleaved: int) -> None:
    x = _draw(B, N, L, 4) if heads_first else _draw(B, L, N * 4)
    inputs = {"input": x, "position_ids": positions, "cos_cache": _draw(8, 2), "sin_cache": _draw(8, 2)}
    _check("RotaryEmbedding", inputs, {"interleaved": interleaved})


def test_rotary_embedding_of_a_part_of_each_head() -> None:
    inputs = {
        "input": _draw(B, L, N * 6),
        "position_ids": np.array([0], np.int64),
        "cos_cache": _draw(8, 2),
        "sin_cache": _draw(8, 2),
    }
    _check("RotaryEmbedding", inputs, {"num_heads": N, "rotary_embedding_dim": 4})


def _grouped(
    packed: bool, past: int, lengths: list[int], rotary: bool, heads: int = 4, groups: int = 2, size: int = 16
) -> dict[str, Any]:
    return {
        "query": _draw(B, L, (heads + 2 * groups) * size if packed else heads * size),
        "key": None if packed else _draw(B, L, groups * size),
        "value": None if packed else _draw(B, L, groups * size),
        "past_key": _draw(B, groups, past, size) if past else None,
        "past_value": _draw(B, groups, past, size) if past else None,
        "seqlens_k": np.array([n - 1 for n in lengths], np.int32),
        "total_sequence_length": np.array(max(lengths), np.int32),
        "cos_cache": _draw(12, size // 2) if rotary else None,
        "sin_cache": _draw(12, size // 2) if rotary else None,
    }


@pytest.mark.parametrize("rotary", [0, 1])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", [{}, {"scale": 0.2}, {"softcap": 1.5}, {"local_window_size": 2}])
def test_group_query_attention(options: dict[str, Any], packed: bool, rotary: int) -> None:
    attributes = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": rotary, **options}
    inputs = _grouped(packed, 0, [L, L], bool(rotary))
    _check("GroupQueryAttention", inputs, attributes, outputs=3, gradients=False)


@pytest.mark.parametrize(
    ("attributes", "others"),
    [
        ({"do_rotary": 1}, {"cos_cache": _draw(12, 8), "sin_cache": _draw(12, 8)}),  # a part of each head
        ({"causal": 0}, {}),
        ({"smooth_softmax": 1}, {}),
        ({"softcap": 1.5}, {"head_sink": _draw(4)}),
    ],
)
def test_group_query_attention_as_model_builders_write_it(attributes: dict[str, Any], others: dict[str, Any]) -> None:
    attributes = {"num_heads": 4, "kv_num_heads": 2, **attributes}
    inputs = _grouped(False, 0, [L, L], bool(attributes.get("do_rotary")), size=32)
    _check("GroupQueryAttention", inputs | _UNUSED | others, attributes, outputs=3, gradients=False)


_UNUSED = dict.fromkeys(("position_ids", "bias", "head_sink", "k_scale", "v_scale", "q_norm_weight", "k_norm_weight"))


def test_what_group_query_attention_computes_on_other_devices_only() -> None:
    """The norm of each head's queries and keys, and a cache of the window's size while it is empty."""
    attributes = {"num_heads": 4, "kv_num_heads": 2, "local_window_size": 2}
    inputs = _grouped(False, 0, [L, L], False)
    weights = {"q_norm_weight": _draw(16), "k_norm_weight": _draw(16)}
    normed = {**inputs}
    for name, weight in zip(("query", "key"), weights.values(), strict=True):
        heads = inputs[name].reshape(B, L, -1, 16)
        normed[name] = (heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-3) * weight).reshape(B, L, -1)
    (expected,) = run_onnxruntime(
        make_model("GroupQueryAttention", normed, attributes, 20, domain=MICROSOFT),
        *(value for value in normed.values() if value is not None),
    )
    attributes |= {"qk_norm_epsilon": 1e-3, "sliding_window_cache": 1}
    given = inputs | _UNUSED | weights
    model = make_model("GroupQueryAttention", given, attributes, 20, domain=MICROSOFT)
    actual = run(model, *(value for value in given.values() if value is not None))
    np.testing.assert_allclose(to_array(actual), expected, atol=1e-5)
    past = inputs | {"past_key": _draw(B, 2, 1, 16), "past_value": _draw(B, 2, 1, 16)}
    for options, words in (
        ({"sliding_window_cache": 1}, "a past in buffers of the window's size is not known"),
        ({"k_quant_type": "PER_TENSOR"}, "a quantized cache is not known"),
    ):
        model = make_model(
            "GroupQueryAttention", past, {"num_heads": 4, "kv_num_heads": 2, **options}, 20, domain=MICROSOFT
        )
        with pytest.raises(NodeError, match=words):
            run(model, *(value for value in past.values() if value is not None))


@pytest.mark.parametrize("lengths", [[4, 4], [4, 3]])
def test_group_query_attention_with_a_past(lengths: list[int]) -> None:
    """One new token each, after pasts of equal length or of different ones; or several for a single sequence."""
    attributes = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1, "rotary_interleaved": 1}
    inputs = _grouped(False, 3, lengths, True)
    inputs |= {name: inputs[name][:, :1] for name in ("query", "key", "value")}
    # onnxruntime is wrong without its outputs 1 and 2; behind a shorter sequence they hold what nobody reads.
    model = make_model("GroupQueryAttention", inputs, attributes, 20, 3, domain=MICROSOFT)
    given = [value for value in inputs.values() if value is not None]
    expected, actual = run_onnxruntime(model, *given), run(model, *given)
    np.testing.assert_allclose(to_array(actual[0]), expected[0], rtol=1e-4, atol=1e-5)
    for left, right in zip(expected[1:], actual[1:], strict=True):
        for sequence, length in enumerate(lengths):
            np.testing.assert_allclose(to_array(right)[sequence, :, :length], left[sequence, :, :length], atol=1e-6)
    inputs = {
        n: v[:1] if v is not None and v.shape[:1] == (B,) else v
        for n, v in _grouped(False, 3, [3 + L] * 2, True).items()
    }
    _check("GroupQueryAttention", inputs, attributes, outputs=3, gradients=False)


def test_group_query_attention_gradients() -> None:
    attributes = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1}
    wide = {
        n: v.astype(float) if v is not None and v.dtype == np.float32 else v
        for n, v in _grouped(False, 2, [2 + L] * 2, True, size=2).items()
    }
    for options in ({}, {"softcap": 1.5}):
        model = make_model("GroupQueryAttention", wide, attributes | options, 20, domain=MICROSOFT)
        check_gradients(model, *(v for v in wide.values() if v is not None))


def test_bad_masks_and_missing_tables_are_named() -> None:
    inputs = {"query": _draw(B, L, H), "key": _draw(B, L, H), "value": _draw(B, L, H), "bias": None}
    inputs["key_padding_mask"] = np.ones(7, np.int32)
    model = make_model("MultiHeadAttention", inputs, {"num_heads": N}, 20, domain=MICROSOFT)
    with pytest.raises(NodeError, match="a mask of 7 numbers for 2 sequences"):
        run(model, *(v for v in inputs.values() if v is not None))
    del inputs["key_padding_mask"]
    model = make_model("MultiHeadAttention", inputs, {"num_heads": N}, 20, 4, domain=MICROSOFT)
    with pytest.raises(NodeError, match="shared buffers, beam search and the output 'qk' of MultiHeadAttention"):
        run(model, *(v for v in inputs.values() if v is not None))
    alone = make_model("MultiHeadAttention", {"query": inputs["query"]}, {"num_heads": N}, 20, domain=MICROSOFT)
    with pytest.raises(NodeError, match="needs key and value, or one of the packed forms"):
        run(alone, inputs["query"])
    grouped = _grouped(False, 0, [L, L], False)
    attributes = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1}
    model = make_model("GroupQueryAttention", grouped, attributes, 20, domain=MICROSOFT)
    with pytest.raises(NodeError, match="do_rotary needs cos_cache and sin_cache"):
        run(model, *(v for v in grouped.values() if v is not None))
