"""Attention written out in many ways becomes one call with the same values and gradients, in float64 to 1e-10."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.graph.fusion.pairs import assert_fused, attention_calls, both, kinds, parse, run, specialized

B, H, L, D = 2, 4, 5, 6
SIGNATURE = "double[b,h,l,d] q, double[b,h,s,d] k, double[b,h,s,e] v", "double[b,h,l,e] y"
LOWEST = float(np.finfo(np.float32).min)


def tensors(heads: int = H, queries: int = L, keys: int = L) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (B, H, queries, D), "k": (B, heads, keys, D), "v": (B, heads, keys, D + 1)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def model(scores: str, stored: dict[str, Any] | None = None, more_inputs: str = "", opset: int = 18) -> Any:
    """`p` of the body are the scores; they go through softmax and the product with the values."""
    body = f"kt = Transpose<perm=[0,1,3,2]>(k)\n{scores}\np = Softmax<axis=-1>(z)\ny = MatMul(p, v)"
    return parse(SIGNATURE[0] + more_inputs, SIGNATURE[1], body, stored, opset)


SCALES = {
    "none": ("z = MatMul(q, kt)", {}),
    "after": ("a = MatMul(q, kt)\nz = Mul(a, c)", {"c": 1 / math.sqrt(D)}),
    "after, the constant first": ("a = MatMul(q, kt)\nz = Mul(c, a)", {"c": 0.3}),
    "divided": ("a = MatMul(q, kt)\nz = Div(a, c)", {"c": math.sqrt(D)}),
    "on the queries": ("a = Mul(q, c)\nz = MatMul(a, kt)", {"c": 0.3}),
    "on both": ("a = Mul(q, c)\nb = Mul(kt, c)\nz = MatMul(a, b)", {"c": 0.5}),
    "of the size": (
        "s = Shape(q)\nn = Slice(s, i, j)\nf = Cast<to=11>(n)\nr = Sqrt(f)\no = Div(one, r)\nw = Sqrt(o)\n"
        "a = Mul(q, w)\nb = Mul(kt, w)\nz = MatMul(a, b)",
        {"i": np.array([-1]), "j": np.array([2**63 - 1]), "one": np.ones(1)},
    ),
    "by head, learned": ("a = MatMul(q, kt)\nz = Mul(a, scale_of_heads)", {"scale_of_heads": np.full((H, 1, 1), 0.7)}),
}


@pytest.mark.parametrize("scale", SCALES, ids=list(SCALES))
def test_scales(scale: str) -> None:
    scores, stored = SCALES[scale]
    weights = ("scale_of_heads",) if "learned" in scale else ()
    _, fused = assert_fused(model(scores, stored), tensors(), {"attention": 1}, trained=weights)
    assert attention_calls(fused.program) == [{"masked": False, "causal": False}]


PRODUCT = "a = MatMul(q, kt)\nx = Mul(a, c)\n"
TRIL = np.tril(np.ones((1, 1, 16, 16), bool))
SLICED = "l = Shape<start=2,end=3>(q)\nn = Concat<axis=0>(l, l)\nm = Slice(tril, zeros, n, axes)\n"
SLICES = {"zeros": np.zeros(2, np.int64), "axes": np.array([2, 3]), "c": 0.4}
RANGE = "l0 = Shape<start=2,end=3>(q)\nl1 = Squeeze(l0)\nr = Range(zero, l1, one)\nrow = Unsqueeze(r, ax1)\n"
RANGES = {"zero": np.array(0), "one": np.array(1), "ax1": np.array([1]), "c": 0.4}

CAUSAL = {
    "a stored triangle, chosen": (f"{PRODUCT}{SLICED}z = Where(m, x, low)", {**SLICES, "tril": TRIL, "low": LOWEST}),
    "a stored triangle, minus infinity": (
        f"{PRODUCT}{SLICED}z = Where(m, x, low)",
        {**SLICES, "tril": TRIL, "low": -math.inf},
    ),
    "the opposite triangle, filled": (f"{PRODUCT}{SLICED}z = Where(m, low, x)", {**SLICES, "tril": ~TRIL, "low": -1e4}),
    "compared positions": (f"{PRODUCT}{RANGE}m = LessOrEqual(r, row)\nz = Where(m, x, low)", {**RANGES, "low": -1e4}),
    "a triangle of floats, added": (
        f"{PRODUCT}{SLICED}z = Add(x, m)",
        {**SLICES, "tril": np.where(TRIL, 0.0, -math.inf)},
    ),
    "the lowest number, added": (f"{PRODUCT}{SLICED}z = Add(m, x)", {**SLICES, "tril": np.where(TRIL, 0.0, LOWEST)}),
    "Trilu of ones": (
        f"{PRODUCT}l = Shape<start=2,end=3>(q)\nn = Concat<axis=0>(l, l)\no = Expand(ones, n)\n"
        f"t = Trilu<upper=0>(o)\ne = Equal(t, zero)\n"
        "m = Where(e, low, zero)\nz = Add(x, m)",
        {"c": 0.4, "ones": np.ones(1), "zero": np.zeros(1), "low": np.full(1, -math.inf)},
    ),
    "one minus a triangle, times a low number": (
        f"{PRODUCT}{SLICED}o = Sub(one, m)\nw = Mul(o, low)\nz = Add(x, w)",
        {**SLICES, "tril": TRIL.astype(np.float64), "one": 1.0, "low": -1e4},
    ),
    "scaled after the mask": (
        f"a = MatMul(q, kt)\n{SLICED}x = Where(m, a, low)\nz = Mul(x, c)",
        {**SLICES, "tril": TRIL, "low": -1e9},
    ),
}


@pytest.mark.parametrize("mask", CAUSAL, ids=list(CAUSAL))
def test_causal_masks_are_recognized_by_their_values(mask: str) -> None:
    """Once the shapes are known, no mask is read at all."""
    inputs = tensors()
    _, fused = assert_fused(model(*CAUSAL[mask]), inputs, {"attention": 1})
    assert attention_calls(fused.program) == [{"masked": True, "causal": False}]
    assert attention_calls(specialized(fused, inputs)) == [{"masked": False, "causal": True}]


def test_a_triangle_that_starts_at_the_end_is_no_causal_mask() -> None:
    """With more keys than queries, the last query may see the last key; torch's `is_causal` counts from the start."""
    body = f"{PRODUCT}m = Slice(tril, i, j, ax)\nz = Where(m, x, low)"
    tril = np.tril(np.ones((1, 1, 8, 8), bool))
    stored = {"c": 0.4, "tril": tril, "low": -1e9, "i": np.array([5]), "j": np.array([8]), "ax": np.array([2])}
    inputs = tensors(queries=3, keys=8)
    _, fused = assert_fused(model(body, stored), inputs, {"attention": 1})
    assert attention_calls(specialized(fused, inputs)) == [{"masked": True, "causal": False}]


WINDOW = np.tril(np.ones((16, 16), bool)) & ~np.tril(np.ones((16, 16), bool), -3)
PAD = ", double[b,one,one2,s] pad"
OTHERS = {
    "window": (f"{PRODUCT}{SLICED}z = Where(m, x, low)", {**SLICES, "tril": WINDOW[None, None], "low": LOWEST}, ""),
    "padding, added": (
        f"{PRODUCT}o = Sub(one1, pad)\nw = Mul(o, low)\nz = Add(x, w)", {"c": 0.4, "one1": 1.0, "low": -1e4}, PAD
    ),
    "padding, chosen": (
        f"{PRODUCT}m = Greater(pad, half)\nz = Where(m, x, low)", {"c": 0.4, "half": 0.5, "low": -1e4}, PAD
    ),
    "causal and padding": (
        f"{PRODUCT}{SLICED}u = Where(m, x, low)\no = Sub(one1, pad)\nw = Mul(o, low)\nz = Add(u, w)",
        {**SLICES, "tril": TRIL, "low": -1e4, "one1": 1.0}, PAD,
    ),
    "padding, added, and causal, minus infinity": (
        f"{PRODUCT}{SLICED}o = Sub(one1, pad)\nw = Mul(o, low)\nu = Add(x, w)\nz = Where(m, u, inf)",
        {**SLICES, "tril": TRIL, "low": -1e4, "one1": 1.0, "inf": -math.inf}, PAD,
    ),
    "ALiBi": (
        f"{PRODUCT}{RANGE}g = Sub(r, row)\nf = Cast<to=11>(g)\nw = Mul(f, slopes)\nu = Add(x, w)\n"
        "m = LessOrEqual(r, row)\nz = Where(m, u, low)",
        {**RANGES, "low": LOWEST, "slopes": np.array([0.5, 0.25, 0.125, 0.0625]).reshape(H, 1, 1)}, "",
    ),
    "learned bias": (
        f"{PRODUCT}z = Add(x, bias)", {"c": 0.4, "bias": np.random.default_rng(0).normal(size=(1, H, L, L))}, ""
    ),
    "scaled after the bias": (
        "a = MatMul(q, kt)\nu = Add(a, bias)\nz = Mul(u, c)",
        {"c": 0.4, "bias": np.random.default_rng(0).normal(size=(1, H, L, L))}, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mask", OTHERS, ids=list(OTHERS))
def test_other_masks(mask: str) -> None:
    scores, stored, more = OTHERS[mask]
    inputs = tensors()
    if more:
        inputs["pad"] = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], dtype=torch.float64).reshape(B, 1, 1, L)
    trained = ("bias",) if "bias" in stored else ()
    assert_fused(model(scores, stored, more), inputs, {"attention": 1}, trained)


def empty_rows(fill: float, form: str) -> Any:
    scores = {
        "chosen": f"{PRODUCT}m = Greater(pad, half)\nz = Where(m, x, low)",
        "added": f"{PRODUCT}m = Greater(pad, half)\nw = Where(m, none, low)\nz = Add(x, w)",
        "chosen after a sum": f"{PRODUCT}m = Greater(pad, half)\nu = Add(x, bias)\nz = Where(m, u, low)",
    }[form]
    stored = {"c": 0.4, "half": 0.5, "low": fill, "none": 0.0, "bias": np.linspace(-1, 1, L * L).reshape(1, 1, L, L)}
    return model(scores, stored, ", double[b,one,l,s] pad")


@pytest.mark.parametrize("form", ["chosen", "added", "chosen after a sum"])
@pytest.mark.parametrize("fill", [-1e4, LOWEST, -math.inf])
def test_queries_without_any_key_keep_their_meaning(fill: float, form: str) -> None:
    """A finite fill gives the mean of the values, minus infinity NaN: what the written-out graph gives."""
    inputs = tensors()
    pad = torch.ones(B, 1, L, L, dtype=torch.float64).tril()
    pad[0, :, 2] = 0
    pad[1] = 0
    inputs["pad"] = pad
    trained = ("bias",) if form == "chosen after a sum" else ()
    plain, _ = assert_fused(empty_rows(fill, form), inputs, {"attention": 1}, trained, math.isfinite(fill))
    result = plain(**inputs)
    assert bool(result[0, :, 2].isnan().all()) == math.isinf(fill)


def test_a_guard_against_nan_gives_zeros() -> None:
    body = (
        f"kt = Transpose<perm=[0,1,3,2]>(k)\n{PRODUCT}m = Greater(pad, half)\nw = Where(m, none, low)\nz = Add(x, w)\n"
        "p = Softmax<axis=-1>(z)\nnan = IsNaN(p)\ng = Where(nan, none, p)\ny = MatMul(g, v)"
    )
    stored = {"c": 0.4, "half": 0.5, "low": -math.inf, "none": 0.0}
    inputs = tensors()
    inputs["pad"] = torch.ones(B, 1, L, L, dtype=torch.float64)
    inputs["pad"][0, :, 1] = 0
    guarded = parse(f"{SIGNATURE[0]}, double[b,one,l,s] pad", SIGNATURE[1], body, stored)
    _, fused = assert_fused(guarded, inputs, {"attention": 1}, gradients=False)
    found, gradients = run(fused, fused, inputs)
    assert bool((found[0][0, :, 1] == 0).all())
    # The written-out graph's own gradients are NaN here; those of torch's kernel are the right ones.
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values())


REPEAT = (
    "u = Unsqueeze(k, two)\nw = {0}(u, counts)\nkr = Reshape(w, four)\nu2 = Unsqueeze(v, two)\nw2 = {0}(u2, countsv)\n"
)
REPEAT += "vr = Reshape(w2, fourv)\nkt = Transpose<perm=[0,1,3,2]>(kr)\nz = MatMul(q, kt)\n"
REPEAT += "p = Softmax<axis=-1>(z)\ny = MatMul(p, vr)"


@pytest.mark.parametrize("op_type", ["Expand", "Tile"])
def test_grouped_heads_are_not_repeated(op_type: str) -> None:
    inputs = tensors(heads=2)
    counts = [1, 1, 2, 1, 1] if op_type == "Tile" else [B, 2, 2, L, D]
    counts_v = [1, 1, 2, 1, 1] if op_type == "Tile" else [B, 2, 2, L, D + 1]
    stored = {
        "two": np.array([2]), "counts": np.array(counts), "countsv": np.array(counts_v),
        "four": np.array([0, H, L, D]), "fourv": np.array([0, H, L, D + 1]),
    }  # fmt: skip
    signature = f"double[{B},{H},{L},{D}] q, double[{B},2,{L},{D}] k, double[{B},2,{L},{D + 1}] v"
    _, fused = assert_fused(parse(signature, SIGNATURE[1], REPEAT.format(op_type), stored), inputs, {"attention": 1})
    node = next(node for node in fused.graph.model.graph if node.op_type == "Attention")
    assert [value.name for value in node.inputs] == ["q", "k", "v"]


def test_one_head_of_keys_for_all() -> None:
    inputs = tensors(heads=1)
    body = "kt = Transpose<perm=[0,1,3,2]>(k)\nz = MatMul(q, kt)\np = Softmax<axis=-1>(z)\ny = MatMul(p, v)"
    signature = f"double[b,{H},l,{D}] q, double[b,1,s,{D}] k, double[b,1,s,e] v"
    assert_fused(parse(signature, SIGNATURE[1], body), inputs, {"attention": 1})


def flat(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.flatten(0, 1) for name, x in inputs.items()}


def test_heads_and_batch_in_one_axis() -> None:
    body = "kt = Transpose<perm=[0,2,1]>(k)\na = MatMul(q, kt)\nz = Add(a, m)\np = Softmax<axis=2>(z)\ny = MatMul(p, v)"
    stored = {"m": np.random.default_rng(0).normal(size=(B * H, 1, L))}
    three = parse("double[n,l,d] q, double[n,s,d] k, double[n,s,e] v", "double[n,l,e] y", body, stored)
    assert_fused(three, flat(tensors()), {"attention": 1})


def test_scores_brought_to_four_axes_for_their_masks() -> None:
    body = (
        "kt = Transpose<perm=[0,2,1]>(k)\na = MatMul(q, kt)\nb = Add(a, alibi)\nw = Reshape(b, four)\nz = Add(w, m)\n"
        "p4 = Softmax<axis=-1>(z)\np = Reshape(p4, three)\ny = MatMul(p, v)"
    )
    rng = np.random.default_rng(0)
    stored = {
        "four": np.array([B, H, L, L]), "three": np.array([B * H, L, L]),
        "alibi": rng.normal(size=(B * H, 1, L)), "m": rng.normal(size=(B, 1, L, L)),
    }  # fmt: skip
    n = B * H
    three = parse(f"double[{n},{L},{D}] q, double[{n},{L},{D}] k, double[{n},{L},e] v", "double[n,l,e] y", body, stored)
    assert_fused(three, flat(tensors()), {"attention": 1})


def test_einsum() -> None:
    """Heads on the third axis, as in flax and TensorFlow."""
    body = 'z = Einsum<equation="bqhd,bkhd->bhqk">(q, k)\np = Softmax<axis=-1>(z)\n'
    body += 'y = Einsum<equation="bhqk,bkhe->bqhe">(p, v)'
    inputs = {name: x.transpose(1, 2).contiguous() for name, x in tensors().items()}
    signature = "double[b,l,h,d] q, double[b,s,h,d] k, double[b,s,h,e] v"
    assert_fused(parse(signature, "double[b,l,h,e] y", body), inputs, {"attention": 1})


def test_keys_transposed_together_with_their_heads() -> None:
    body = "kt = Transpose<perm=[0,2,3,1]>(k)\nz = MatMul(q, kt)\np = Softmax<axis=-1>(z)\ny = MatMul(p, v)"
    inputs = tensors()
    inputs["k"] = inputs["k"].transpose(1, 2).contiguous()
    signature = "double[b,h,l,d] q, double[b,s,h,d] k, double[b,h,s,e] v"
    assert_fused(parse(signature, SIGNATURE[1], body), inputs, {"attention": 1})


def test_dropout_on_the_probabilities() -> None:
    """Absent in evaluation; in training the mean over many draws is the result without it."""
    body = "kt = Transpose<perm=[0,1,3,2]>(k)\nz = MatMul(q, kt)\np = Softmax<axis=-1>(z)\n"
    body += "d = Dropout(p, ratio)\ny = MatMul(d, v)"
    dropping = parse(*SIGNATURE, body, {"ratio": np.array(0.25, np.float32)})
    inputs = tensors()
    _, fused = assert_fused(dropping, inputs, {"attention": 1})
    expected = fused(**inputs)
    fused.train()
    torch.manual_seed(0)
    draws = torch.stack([fused(**inputs) for _ in range(2000)])
    error = (draws.mean(0) - expected) / (draws.std(0) / math.sqrt(2000))
    assert draws.std(0).min() > 0
    assert error.abs().max() < 5  # 280 numbers, each a normal deviate


REFUSED = {
    "probabilities are an output": ("z = MatMul(q, kt)", {}, "p"),
    "scores are an output": ("z = MatMul(q, kt)", {}, "z"),
    "a fill that does not hide": (
        f"{PRODUCT}{SLICED}z = Where(m, x, low)",
        {**SLICES, "tril": TRIL, "low": -100.0},
        "",
    ),
    "capped scores": ("a = MatMul(q, kt)\nz = Tanh(a)", {}, ""),
    "a factor for every key": ("a = MatMul(q, kt)\nz = Mul(a, f)", {"f": np.ones((1, 1, 1, L))}, ""),
}


@pytest.mark.parametrize("why", REFUSED, ids=list(REFUSED))
def test_what_is_no_attention_stays(why: str) -> None:
    scores, stored, also = REFUSED[why]
    proto = model(scores, stored)
    if also:
        proto.graph.output.append(proto.graph.output[0].__class__(name=also))
        proto.graph.output[-1].CopyFrom(proto.graph.output[0])
        proto.graph.output[-1].name = also
        for dim in proto.graph.output[-1].type.tensor_type.shape.dim:
            dim.Clear()
    _, fused = both(proto)
    assert kinds(fused.graph) == {}


def test_names_that_are_asked_for_stay() -> None:
    _, fused = both(model("z = MatMul(q, kt)"), keep=("p",))
    assert kinds(fused.graph) == {}
    assert any(value.name == "p" for node in fused.graph.model.graph for value in node.outputs)


@pytest.mark.parametrize("opset", [11, 12, 13, 23])
def test_every_opset(opset: int) -> None:
    scores, stored = CAUSAL["a stored triangle, chosen"]
    scores = scores.replace("l = Shape<start=2,end=3>(q)", "s0 = Shape(q)\nl = Slice(s0, two, three)")
    stored = {**stored, "two": np.array([2]), "three": np.array([3])}
    assert_fused(model(scores, stored, opset=opset), tensors(), {"attention": 1})


def test_layers_share_one_mask() -> None:
    """Two layers that compute the same mask each for itself read one prepared mask."""
    layer = "kt{0} = Transpose<perm=[0,1,3,2]>(k)\na{0} = MatMul({1}, kt{0})\nm{0} = Greater(pad, half)\n"
    layer += "z{0} = Where(m{0}, a{0}, low)\np{0} = Softmax<axis=-1>(z{0})\ny{0} = MatMul(p{0}, v)\n"
    body = layer.format("", "q") + layer.format("2", "y")
    stored = {"half": 0.5, "low": -1e4}
    signature = "double[b,h,l,d] q, double[b,h,s,d] k, double[b,h,s,d] v, double[b,1,1,s] pad"
    inputs = tensors()
    inputs["v"] = inputs["v"][..., :D].contiguous()
    inputs["pad"] = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], dtype=torch.float64).reshape(B, 1, 1, L)
    _, fused = assert_fused(parse(signature, "double[b,h,l,d] y2", body, stored), inputs, {"attention": 2})
    assert sum(node.op_type == "OpenedMask" for node in fused.graph.model.graph) == 1


def test_a_mask_that_makes_scores_larger_stays() -> None:
    """One sequence against the masks of two samples: torch's kernel does not broadcast that way."""
    body = (
        "kt = Transpose<perm=[0,1,3,2]>(k)\na = MatMul(q, kt)\nz = Add(a, pad)\n"
        "p = Softmax<axis=-1>(z)\ny = MatMul(p, v)"
    )
    signature = "double[1,h,l,d] q, double[1,h,s,d] k, double[1,h,s,e] v, double[2,1,1,s] pad"
    _, fused = both(parse(signature, SIGNATURE[1], body))
    assert kinds(fused.graph) == {}
