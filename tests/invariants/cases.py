"""Small models of five kinds with their losses and data, for laws of runs in many layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from onward.models import create_model
from tests.graph.fusion.pairs import parse
from tests.models.running import initial_weights, replace_weights, shake
from tests.plan.horizontal.graphs import parsed_model
from tests.plan.staged_models import Sketch, mlp, u_net


@dataclass(frozen=True)
class Case:
    """A model, its loss, and its data: so many samples, the first of which are the same however many there are."""

    model: Callable[[], ir.Model]
    loss: Mapping[str, Any]
    data: Callable[[int], dict[str, np.ndarray]]
    training: Mapping[str, Any] = field(default_factory=dict)


def random(shape: tuple[int, ...], below: int | None = None, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    if below is None:
        return generator.random(shape, dtype=np.float32)
    return generator.integers(0, below, shape)


def _shaken(name: str, **options: Any) -> ir.Model:
    model = create_model(name, **options)
    replace_weights(model, shake(initial_weights(model)))
    return model


TOKENS, WORDS, IMAGE = 12, 64, 8
TRANSFORMER = {
    "size": "tiny", "layers": 2, "width": 32, "heads": 4, "vocab_size": WORDS, "context_length": TOKENS,
}  # fmt: skip


def gpt2() -> ir.Model:
    """Four heads, two layers, the output layer tied to the embedding."""
    return _shaken("gpt2", **TRANSFORMER, dropout=0.0)


def gpt2_of_three_heads() -> ir.Model:
    return _shaken("gpt2", **{**TRANSFORMER, "heads": 3, "width": 48}, dropout=0.0)


def gpt2_with_dropout() -> ir.Model:
    return _shaken("gpt2", **TRANSFORMER, dropout=0.2)


def deep_gpt2() -> ir.Model:
    """Eight layers: enough for two stages on each of four ranks."""
    return _shaken("gpt2", **{**TRANSFORMER, "layers": 8}, dropout=0.0)


def gpt2_of_many_words() -> ir.Model:
    """Enough for the last layer and its loss to become one function."""
    return _shaken("gpt2", **{**TRANSFORMER, "layers": 4, "vocab_size": 288}, dropout=0.0)


def tokens(samples: int) -> dict[str, np.ndarray]:
    """Samples count unequal numbers of labels: of eight in a row, the first all of them, the last one or two in ten."""
    labels = random((samples, TOKENS), WORDS, seed=1)
    labels[random((samples, TOKENS), 10, seed=2) < np.arange(samples)[:, None] % 8] = -100
    return {"input_ids": random((samples, TOKENS), WORDS), "labels": labels}


def bert() -> ir.Model:
    return _shaken("bert", **TRANSFORMER, dropout=0.0)


def sentences(samples: int) -> dict[str, np.ndarray]:
    ids = random((samples, 3), WORDS - 1, seed=2) + 1
    ids[random((samples, 3), 2, seed=6) == 0] = 0
    return {
        "input1": random((samples, TOKENS), WORDS),
        "input2": random((samples, TOKENS), 2, seed=1),
        "input3": (np.arange(TOKENS)[None] < random((samples, 1), 4, seed=3) + 9).astype(np.int64),
        "masked_lm_positions": random((samples, 3), 9, seed=4),
        "masked_lm_ids": ids,
        "next_sentence_labels": random((samples,), 2, seed=5),
    }


def squeezenet() -> ir.Model:
    model = create_model("squeezenet", image_size=IMAGE, channels=1, classes=10, dropout=0.0)
    replace_weights(model, initial_weights(model))
    return model


def in_float64(model: ir.Model) -> ir.Model:
    """The same with 64-bit weights, inputs and outputs.

    Where a network has kinks (ReLU, the larger of two in a pool), one rounding error can become a jump of a gradient;
    in 64 bits that is so rare that equal means equal.
    """
    graph = model.graph
    for value in (*graph.initializers.values(), *graph.inputs, *(out for node in graph for out in node.outputs)):
        if value.const_value is not None and value.dtype == ir.DataType.FLOAT:
            value.const_value = ir.Tensor(value.const_value.numpy().astype(np.float64), name=value.name)
        if value.dtype == ir.DataType.FLOAT:
            value.dtype = ir.DataType.DOUBLE
    return model


def images(samples: int) -> dict[str, np.ndarray]:
    return {"images": random((samples, 1, IMAGE, IMAGE)), "labels": random((samples,), 10, seed=1)}


def pictures(samples: int) -> dict[str, np.ndarray]:
    x = random((samples, 1, 16, 16))
    return {"x": x, "target": x.cumsum(axis=-1, dtype=np.float32) / 8}


def tied_words() -> ir.Model:
    """Words by their neighbors, without attention; one table for input and output.

    Among its weights are a single number (`sharpness`) and one of fewer rows than there may be replicas (`offset`).
    """
    sketch, width = Sketch(seed=5), 16
    ids = sketch.input("ids", ["batch", TOKENS], ir.DataType.INT64)
    table = sketch.weight("table", WORDS, width)
    turned_table = sketch.node("Transpose", "turned_table", table, perm=[1, 0])  # long before it is read
    value = sketch.node("Gather", "embedded", table, ids)
    value = sketch.node("Add", "moved", value, sketch.weight("offset", 1, width))
    for layer in range(2):
        turned = sketch.node("Transpose", f"columns{layer}", value, perm=[0, 2, 1])
        kernel = sketch.weight(f"mix{layer}.weight", width, width, 3)
        mixed = sketch.node("Conv", f"mix{layer}", turned, kernel, pads=[2, 0])
        rows = sketch.node("Transpose", f"rows{layer}", mixed, perm=[0, 2, 1])
        wide = sketch.node("MatMul", f"wide{layer}", rows, sketch.weight(f"wide{layer}.weight", width, 4 * width))
        bent = sketch.node("Tanh", f"bent{layer}", sketch.node("Add", f"wide_sum{layer}", wide,
                           sketch.weight(f"wide{layer}.bias", 4 * width)))  # fmt: skip
        narrow = sketch.node("MatMul", f"narrow{layer}", bent, sketch.weight(f"narrow{layer}.weight", 4 * width, width))
        value = sketch.node("Add", f"sum{layer}", value, narrow)
    scale = sketch.weight("norm.scale", array=np.linspace(0.5, 1.5, width, dtype=np.float32))
    value = sketch.node("LayerNormalization", "normed", value, scale, axis=-1)
    value = sketch.node("Mul", "sharp", value, sketch.weight("sharpness", array=np.array(0.7, np.float32)))
    logits = sketch.node("MatMul", "logits", value, turned_table)
    logits.shape = ir.Shape(["batch", TOKENS, WORDS])
    return sketch.model(logits)


EXPERTS, HIDDEN = 4, 12


def slots() -> ir.Model:
    """Residual mixtures: two whose tokens the model puts into slots of experts, and one of an operator.

    A stack with a capacity of two tokens of a sequence (Switch Transformer), single experts of means (soft mixture),
    and ONNX Runtime's `MoE` with a gate.
    """
    loop = "".join(
        f"r{e} = Gather<axis=1>(means, n{e})\np{e} = MatMul(r{e}, up{e})\nh{e} = Add(p{e}, upbias{e})\n"
        f"a{e} = Tanh(h{e})\nq{e} = MatMul(a{e}, down{e})\no{e} = Add(q{e}, downbias{e})\nu{e} = Unsqueeze(o{e}, one)\n"
        for e in range(EXPERTS)
    )
    body = f"""
    x0 = Gather(table, ids)
    scores0 = MatMul(x0, router0)
    shares0 = Softmax(scores0)
    best = ReduceMax(shares0, last)
    chosen = ArgMax<axis=-1>(shares0)
    chose = Equal(chosen, numbers)
    mask = Cast<to=1>(chose)
    counted = CumSum(mask, n1)
    masked = Mul(counted, mask)
    place = ReduceSum(masked, last)
    fits = Equal(place, places)
    slot = Cast<to=1>(fits)
    dispatch = Einsum<equation="bne,bnc->bnec">(mask, slot)
    weights = Unsqueeze(best, last)
    combine = Mul(dispatch, weights)
    rows = Einsum<equation="bnec,bnd->becd">(dispatch, x0)
    products = MatMul(rows, stack_up)
    inner = Relu(products)
    results = MatMul(inner, stack_down)
    mixed = Einsum<equation="becd,bnec->bnd">(results, combine)
    x1 = Add(x0, mixed)
    scores1 = MatMul(x1, router1)
    of_tokens = Softmax<axis=1>(scores1)
    turned = Transpose<perm=[0,2,1]>(of_tokens)
    flat = MatMul(turned, x1)
    means = Reshape(flat, split)
    {loop}
    stack = Concat<axis=1>({", ".join(f"u{e}" for e in range(EXPERTS))})
    all = Reshape(stack, merged)
    of_slots = Softmax<axis=2>(scores1)
    sum = MatMul(of_slots, all)
    x2 = Add(x1, sum)
    scores2 = MatMul(x2, router2)
    rows2 = Reshape(scores2, rows_of_scores)
    moe = com.microsoft.MoE<k=2, activation_type="silu">(x2, rows2, gates, , backs, , values)
    x3 = Add(x2, moe)
    logits = MatMul(x3, head)"""
    width = 16
    numbers = {
        "rows_of_scores": np.array([-1, EXPERTS]),
        "last": np.array([-1]), "numbers": np.arange(EXPERTS), "places": np.arange(1, 3, dtype=np.float32),
        "split": np.array([0, EXPERTS, 2, width]), "merged": np.array([0, 2 * EXPERTS, width]),
        "one": np.array([1]), **{f"n{e}": np.array(e) for e in range(EXPERTS)},
    }  # fmt: skip
    return _with_experts(body, numbers, {
        "router1": (width, 2 * EXPERTS), "router2": (width, EXPERTS), "gates": (EXPERTS, HIDDEN, width),
        "values": (EXPERTS, HIDDEN, width), "backs": (EXPERTS, width, HIDDEN),
    })  # fmt: skip


def mixtures() -> ir.Model:
    """Two residual mixtures of experts: stacks of weights without biases, and a loop over layers with biases."""
    loop = "".join(
        f"m{e} = Equal(chosen1, n{e})\nw{e} = Where(m{e}, best1, zero)\ng{e} = ReduceSum(w{e}, last)\n"
        f"p{e} = MatMul(x1, up{e})\nh{e} = Add(p{e}, upbias{e})\na{e} = Relu(h{e})\n"
        f"q{e} = MatMul(a{e}, down{e})\no{e} = Add(q{e}, downbias{e})\nt{e} = Mul(g{e}, o{e})\n"
        for e in range(EXPERTS)
    )
    routes = [
        f"scores{i} = MatMul(x{i}, router{i})\nshares{i} = Softmax(scores{i})\n"
        f"best{i}, chosen{i} = TopK(shares{i}, two)"
        for i in range(2)
    ]
    body = f"""
    x0 = Gather(table, ids)
    {routes[0]}
    sizes = Shape(shares0)
    none = Expand(zero, sizes)
    gates = ScatterElements<axis=-1>(none, chosen0, best0)
    products = Einsum<equation="bnd,edf->bnef">(x0, stack_up)
    inner = Relu(products)
    mixed = Einsum<equation="bnef,efd,bne->bnd">(inner, stack_down, gates)
    x1 = Add(x0, mixed)
    {routes[1]}
    {loop}
    s1 = Add(t0, t1)
    s2 = Add(s1, t2)
    sum = Add(s2, t3)
    x2 = Add(x1, sum)
    logits = MatMul(x2, head)"""
    numbers = {"two": np.array([2]), "last": np.array([-1]), **{f"n{e}": np.array(e) for e in range(EXPERTS)}}
    return _with_experts(body, {**numbers, "zero": np.zeros(1, np.float32)})


def _with_experts(
    body: str, numbers: Mapping[str, np.ndarray], other_sizes: Mapping[str, tuple[int, ...]] | None = None
) -> ir.Model:
    """A graph of words with these constants, and weights of a stack of experts and of single ones."""
    width, rng = 16, np.random.default_rng(7)
    sizes: dict[str, tuple[int, ...]] = {
        "table": (WORDS, width), "router0": (width, EXPERTS), "router1": (width, EXPERTS), "head": (width, WORDS),
        "stack_up": (EXPERTS, width, HIDDEN), "stack_down": (EXPERTS, HIDDEN, width),
        **{f"up{e}": (width, HIDDEN) for e in range(EXPERTS)}, **{f"upbias{e}": (HIDDEN,) for e in range(EXPERTS)},
        **{f"down{e}": (HIDDEN, width) for e in range(EXPERTS)}, **{f"downbias{e}": (width,) for e in range(EXPERTS)},
        **(other_sizes or {}),
    }  # fmt: skip
    stored = {name: rng.normal(0, size[-1] ** -0.5, size).astype(np.float32) for name, size in sizes.items()}
    outputs = f"float[b,{TOKENS},{WORDS}] logits"
    return ir.from_proto(parse(f"int64[b,{TOKENS}] ids", outputs, body, {**stored, **numbers}))


def shared_heads(key_heads: int) -> ir.Model:
    """Four heads of queries, fewer of keys and values, and a gated MLP, all from one matmul, as in PaLM."""
    parts = [16, 4 * key_heads, 4 * key_heads, 32, 32]
    weights = {
        "table": (WORDS, 16), "joint": (16, sum(parts)), "bias": (sum(parts),), "out": (16, 16), "down": (32, 16),
        "head": (16, WORDS),
    }  # fmt: skip
    inputs = "".join(f", float[{', '.join(map(str, shape))}] {name}" for name, shape in weights.items())
    text = f"""g (int64[batch, {TOKENS}] ids{inputs}) => (float[batch, {TOKENS}, {WORDS}] logits)
        <int64[5] parts = {{{", ".join(map(str, parts))}}}, int64[4] heads = {{0, 0, 4, 4}},
         int64[5] group = {{0, 0, {key_heads}, 1, 4}}, int64[5] each = {{1, 1, 1, {4 // key_heads}, 1}},
         int64[3] merged = {{0, 0, 16}}> {{
        x = Gather (table, ids)  m = MatMul (x, joint)  j = Add (m, bias)
        q, k, v, gate, up = Split <axis = 2> (j, parts)
        q4 = Reshape (q, heads)  qh = Transpose <perm = [0, 2, 1, 3]> (q4)
        k5 = Reshape (k, group)  ke = Expand (k5, each)  k4 = Reshape (ke, heads)
        v5 = Reshape (v, group)  ve = Expand (v5, each)  v4 = Reshape (ve, heads)
        kh = Transpose <perm = [0, 2, 3, 1]> (k4)  vh = Transpose <perm = [0, 2, 1, 3]> (v4)
        scores = MatMul (qh, kh)  seen = Softmax <axis = -1> (scores)  a = MatMul (seen, vh)
        at = Transpose <perm = [0, 2, 1, 3]> (a)  am = Reshape (at, merged)  o = MatMul (am, out)
        bent = Tanh (gate)  gated = Mul (bent, up)  d = MatMul (gated, down)
        both = Add (o, d)  y = Add (x, both)  logits = MatMul (y, head)
    }}"""
    return parsed_model(text, weights, 0.25)


def words(samples: int) -> dict[str, np.ndarray]:
    found = tokens(samples)
    return {"ids": found["input_ids"], "labels": found["labels"]}


def spelled(samples: int) -> dict[str, np.ndarray]:
    """Sequences of one to five labels, none of them the blank, 0."""
    labels = random((samples, 5), WORDS - 1, seed=1) + 1
    labels[np.arange(5)[None] > np.arange(samples)[:, None] % 5] = -1
    return {"ids": random((samples, TOKENS), WORDS), "labels": labels}


def doubled(data: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array.astype(np.float64) if array.dtype == np.float32 else array for name, array in data.items()}


def points(samples: int) -> dict[str, np.ndarray]:
    labels = random((samples,), 8, seed=1)
    return {"x": random((samples, 8)) + 2 * np.eye(8, dtype=np.float32)[labels], "labels": labels}


SQUARES = {"type": "mean_squared_error", "prediction": "image", "label": "target"}
CROSS_ENTROPY = {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"}
IGNORING = {**CROSS_ENTROPY, "ignore_index": -100}
CASES = {
    "mlp": Case(mlp, CROSS_ENTROPY, points),
    "gpt2": Case(gpt2, IGNORING, tokens),
    "gpt2_with_dropout": Case(gpt2_with_dropout, IGNORING, tokens),
    "deep_gpt2": Case(deep_gpt2, IGNORING, tokens),
    "gpt2_of_many_words": Case(gpt2_of_many_words, IGNORING, tokens),
    "gpt2_of_weighted_classes": Case(
        gpt2, {**IGNORING, "class_weights": [0.5 + n % 7 / 3 for n in range(WORDS)]}, tokens
    ),
    "bert": Case(bert, {"type": "bert"}, sentences),
    "squeezenet": Case(squeezenet, CROSS_ENTROPY, images),
    "squeezenet_64": Case(lambda: in_float64(squeezenet()), CROSS_ENTROPY, lambda n: doubled(images(n))),
    "u_net": Case(u_net, SQUARES, pictures),
    "u_net_64": Case(lambda: in_float64(u_net()), SQUARES, lambda n: doubled(pictures(n))),
    "spelled_words": Case(
        tied_words, {"type": "ctc", "prediction": "logits", "label": "labels"}, spelled, {"weights_to_train": ["*"]}
    ),
    "mixtures": Case(mixtures, IGNORING, words, {"weights_not_to_train": ["zero"]}),
    "slots": Case(slots, IGNORING, words, {"weights_not_to_train": ["places"]}),
    "tied_words": Case(tied_words, IGNORING, words, {"weights_to_train": ["*"]}),
    "one_key_head": Case(lambda: shared_heads(1), IGNORING, words),
    "two_key_heads": Case(lambda: shared_heads(2), IGNORING, words),
}
