"""GPT-2 (Radford et al., 2019) as an ONNX graph: a pre-norm transformer decoder over learned positions.

Weights have the names and layouts of the original's release (`h.0.attn.c_attn.weight` is [width, 3·width]).
Shapes: B batch, S sequence, V vocabulary, W width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from onward.models.graph_writer import Fill, GraphWriter, normal
from onward.models.layers import (
    MASKED_SCORE,
    attend,
    attention_scores,
    count_positions,
    dropout,
    gelu_tanh,
    layer_norm,
    linear,
    merge_heads,
    split_heads,
)
from onward.models.reference_model import option
from onward.models.transformer_options import TransformerOptions, TransformerSize

SIZES = {
    "tiny": TransformerSize(layers=2, heads=3, width=192, vocab_size=512, context_length=128),
    "small": TransformerSize(layers=12, heads=12, width=768, vocab_size=50257, context_length=1024),
    "medium": TransformerSize(layers=24, heads=16, width=1024, vocab_size=50257, context_length=1024),
    "large": TransformerSize(layers=36, heads=20, width=1280, vocab_size=50257, context_length=1024),
    "xl": TransformerSize(layers=48, heads=25, width=1600, vocab_size=50257, context_length=1024),
}
"""The four sizes of the release (124M, 355M, 774M and 1558M weights), and one for a laptop."""

EPSILON = 1e-5
STD = 0.02


@dataclass(frozen=True, kw_only=True)
class GPT2Options(TransformerOptions):
    """Options of `gpt2`."""

    SIZES: ClassVar[dict[str, TransformerSize]] = SIZES
    size: str = option("small", "layers, heads, width, vocabulary and context together", choices=tuple(SIZES))
    tied_embedding: bool = option(True, "one weight for the token embedding and the output layer")
    position_ids: bool = option(False, "take the positions as a second input instead of counting from 0")


def build_gpt2(options: GPT2Options) -> ir.Model:
    """Writes GPT-2.

    Inputs: `input_ids` int64 [batch, sequence]; with the option `position_ids`, also `position_ids` int64
    [batch, sequence]. Output: `logits` float32 [batch, sequence, vocabulary], where `logits[:, s]` predicts
    token s + 1. The longest sequence is noted in the model's metadata as `context_length`. Weights are drawn from
    N(0, 0.02²), those that end a residual branch from N(0, 0.02² / (2·layers)) as in the paper, section 2.3.
    """
    width, vocab_size = options.shape.width, options.shape.vocab_size
    writer = GraphWriter(f"gpt2_{options.size}", options.opset, options.seed)
    input_ids = writer.input("input_ids", ir.DataType.INT64, ["batch", "sequence"])
    given = options.position_ids
    position_ids = writer.input("position_ids", ir.DataType.INT64, ["batch", "sequence"]) if given else None
    positions = count_positions(writer, input_ids)
    causal = _causal_mask(writer, positions)
    table = writer.weight("wte.weight", (vocab_size, width), normal(STD))
    places = writer.weight("wpe.weight", (options.shape.context_length, width), normal(STD))
    tokens = writer.op("Gather", table, input_ids)
    x = writer.op("Add", tokens, writer.op("Gather", places, positions if position_ids is None else position_ids))
    x = dropout(writer, x, options.dropout)
    for layer in range(options.shape.layers):
        with writer.scope(f"h.{layer}"):
            x = _layer(writer, x, causal, options)
    x = layer_norm(writer, x, "ln_f", width, EPSILON)
    head = table if options.tied_embedding else writer.weight("lm_head.weight", (vocab_size, width), normal(STD))
    logits = writer.op("MatMul", x, writer.op("Transpose", head, perm=[1, 0]), name="logits")
    longest = {"context_length": str(options.shape.context_length)}
    return writer.finish([(logits, ["batch", "sequence", vocab_size])], metadata=longest)


def _causal_mask(writer: GraphWriter, positions: ir.Value) -> ir.Value:
    """bool [S, S]: whether the query of a row may see the key of a column, which must not be after it."""
    with writer.scope("causal"):
        columns = writer.op("Unsqueeze", positions, writer.integers([0]))
        rows = writer.op("Unsqueeze", positions, writer.integers([1]))
        return writer.op("LessOrEqual", columns, rows)


def _layer(writer: GraphWriter, x: ir.Value, causal: ir.Value, options: GPT2Options) -> ir.Value:
    width = options.shape.width
    residual = normal(STD / math.sqrt(2 * options.shape.layers))
    attended = _attention(writer, layer_norm(writer, x, "ln_1", width, EPSILON), causal, options, residual)
    x = writer.op("Add", x, attended)
    hidden = layer_norm(writer, x, "ln_2", width, EPSILON)
    with writer.scope("mlp"):
        hidden = gelu_tanh(writer, linear(writer, hidden, "c_fc", width, 4 * width, normal(STD)))
        hidden = linear(writer, hidden, "c_proj", 4 * width, width, residual)
        hidden = dropout(writer, hidden, options.dropout)
    return writer.op("Add", x, hidden)


def _attention(writer: GraphWriter, x: ir.Value, causal: ir.Value, options: GPT2Options, residual: Fill) -> ir.Value:
    width = options.shape.width
    head_width = width // options.shape.heads
    with writer.scope("attn"):
        joint = linear(writer, x, "c_attn", width, 3 * width, normal(STD))
        parts = writer.ops("Split", joint, writer.integers([width] * 3), output_count=3, axis=2)
        query, key, value = (split_heads(writer, part, head_width) for part in parts)
        scores = attention_scores(writer, query, key, head_width)
        scores = writer.op("Where", causal, scores, writer.number(MASKED_SCORE))
        merged = merge_heads(writer, attend(writer, scores, value, options.dropout))
        return dropout(writer, linear(writer, merged, "c_proj", width, width, residual), options.dropout)
