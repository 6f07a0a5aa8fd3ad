"""A Llama of one block as the model builder of onnxruntime-genai writes it: fused attention, a cache, 4-bit layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HIDDEN, HEADS, HEAD, INNER, TOKENS, ROWS = 32, 2, 16, 64, 40, 24
BLOCK = 16
MICROSOFT = "com.microsoft"
EMPTY_CACHE = {"past_key_values.*": 0.0}


def genai_model(is_quantized: bool = True, dtype: type = np.float32) -> onnx.ModelProto:
    """Token ids and a mask to scores of `TOKENS`; `past_key_values.0.key` and `.value` are inputs without a default."""
    random, weights, nodes = np.random.default_rng(0), dict[str, np.ndarray](), list[onnx.NodeProto]()

    def add(op_type: str, inputs: list[str], *outputs: str, domain: str = "", **attributes: Any) -> str:
        nodes.append(helper.make_node(op_type, inputs, list(outputs), f"/{outputs[0]}", domain=domain, **attributes))
        return outputs[0]

    def linear(x: str, name: str, columns: int, rows: int) -> str:
        full = f"{name}.MatMul.weight"
        if not is_quantized:
            weights[full] = (0.2 * random.standard_normal((columns, rows))).astype(dtype)
            return add("MatMul", [x, full], f"{name}/out")
        blocks = columns // BLOCK
        weights[f"{full}_Q4"] = random.integers(0, 256, (rows, blocks, BLOCK // 2), np.uint8)
        weights[f"{full}_scales"] = (0.02 + 0.02 * random.random((rows, blocks))).astype(dtype)
        sizes = {"K": columns, "N": rows, "bits": 4, "block_size": BLOCK, "accuracy_level": 0}
        return add("MatMulNBits", [x, f"{full}_Q4", f"{full}_scales"], f"{name}/out", domain=MICROSOFT, **sizes)

    def stored(name: str, array: np.ndarray) -> str:
        weights[name] = array
        return name

    angles = np.arange(ROWS)[:, None] / 100 ** (np.arange(HEAD // 2) / HEAD * 2)
    tables = [stored("cos_cache", np.cos(angles).astype(dtype)), stored("sin_cache", np.sin(angles).astype(dtype))]
    summed = add("ReduceSum", ["attention_mask", stored("axis", np.array([1]))], "sum", keepdims=0)
    keys = add("Cast", [add("Sub", [summed, stored("one", np.array([1]))], "less_one")], "keys", to=TensorProto.INT32)
    length = add("Gather", [add("Shape", ["attention_mask"], "mask_shape"), stored("at", np.array(1))], "length")
    total = add("Cast", [length], "total", to=TensorProto.INT32)
    embed = stored("model.embed_tokens.weight", random.standard_normal((TOKENS, HIDDEN)).astype(dtype))
    x = add("Gather", [embed, "input_ids"], "embedded")
    norms = [stored(f"model.layers.0.{n}_layernorm.weight", np.ones(HIDDEN, dtype)) for n in ("input", "post", "final")]
    normed = add("SimplifiedLayerNormalization", [x, norms[0]], "normed", epsilon=1e-5)
    qkv = linear(normed, "model.layers.0.attn.qkv_proj", HIDDEN, (HEADS + 2) * HEAD)
    past = ["past_key_values.0.key", "past_key_values.0.value"]
    heads: dict[str, Any] = {"num_heads": HEADS, "kv_num_heads": 1, "do_rotary": 1}
    inputs = [qkv, "", "", *past, keys, total, *tables]
    attended = add(
        "GroupQueryAttention", inputs, "attended", "present.0.key", "present.0.value", domain=MICROSOFT, **heads
    )
    own = linear(attended, "model.layers.0.attn.o_proj", HEADS * HEAD, HIDDEN)
    skip: dict[str, Any] = {"domain": MICROSOFT, "epsilon": 1e-5}
    add("SkipSimplifiedLayerNormalization", [x, own, norms[1]], "post", "", "", "kept", **skip)
    gate = linear("post", "model.layers.0.mlp.gate_proj", HIDDEN, INNER)
    up = linear("post", "model.layers.0.mlp.up_proj", HIDDEN, INNER)
    act = add("Mul", [gate, add("Sigmoid", [gate], "sigmoid")], "swish")
    down = linear(add("Mul", [act, up], "inner"), "model.layers.0.mlp.down_proj", INNER, HIDDEN)
    last = add("SkipSimplifiedLayerNormalization", ["kept", down, norms[2]], "last", **skip)
    nodes[-1].output[0] = "last"
    scores = linear(last, "lm_head", HIDDEN, TOKENS)
    nodes[-1].output[0] = "logits"
    assert scores
    kind, batch = helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), "batch_size"
    cache: list[str | int | None] = [batch, 1, "past_sequence_length", HEAD]
    graph = helper.make_graph(
        nodes,
        "main_graph",
        [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, [batch, "sequence_length"]),
            helper.make_tensor_value_info("attention_mask", TensorProto.INT64, [batch, "total_sequence_length"]),
            *(helper.make_tensor_value_info(name, kind, cache) for name in past),
        ],
        [
            helper.make_tensor_value_info("logits", kind, [batch, "sequence_length", TOKENS]),
            *(helper.make_tensor_value_info(f"present.0.{n}", kind, [batch, 1, "t", HEAD]) for n in ("key", "value")),
        ],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10, producer_name="onnxruntime-genai")


def feeds(dtype: type = np.float32, samples: int = 2) -> dict[str, np.ndarray]:
    """What such a model reads of sequences without a past."""
    ids = np.random.default_rng(1).integers(0, TOKENS, (samples, 8))
    empty: np.ndarray = np.zeros((samples, 1, 0, HEAD), dtype)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)} | dict.fromkeys(
        ("past_key_values.0.key", "past_key_values.0.value"), empty
    )
