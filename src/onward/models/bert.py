"""BERT (Devlin et al., 2018) with both pretraining heads as an ONNX graph: a post-norm transformer encoder.

Inputs and outputs have the names that ONNX Runtime's BERT trainer expected. Weights have the dotted names of the
`transformers` library, linear ones transposed to [inputs, outputs].
Shapes: B batch, S sequence, V vocabulary, W width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from onward.models.graph_writer import GraphWriter, constant, normal
from onward.models.layers import (
    MASKED_SCORE,
    attend,
    attention_scores,
    count_positions,
    dropout,
    gelu,
    layer_norm,
    linear,
    merge_heads,
    split_heads,
)
from onward.models.reference_model import option
from onward.models.transformer_options import TransformerOptions, TransformerSize

SIZES = {
    "tiny": TransformerSize(layers=2, heads=2, width=128, vocab_size=512, context_length=128),
    "base": TransformerSize(layers=12, heads=12, width=768, vocab_size=30522, context_length=512),
    "large": TransformerSize(layers=24, heads=16, width=1024, vocab_size=30522, context_length=512),
}
"""The two sizes of the paper (110M and 335M weights), and one for a laptop."""

EPSILON = 1e-12
STD = 0.02


@dataclass(frozen=True, kw_only=True)
class BertOptions(TransformerOptions):
    """Options of `bert`."""

    SIZES: ClassVar[dict[str, TransformerSize]] = SIZES
    size: str = option("base", "layers, heads, width, vocabulary and context together", choices=tuple(SIZES))
    segments: int = option(2, "segment ids that the second input may hold", minimum=1)


def build_bert(options: BertOptions) -> ir.Model:
    """Writes BERT.

    Inputs, all int64 [batch, sequence]: `input1` token ids, `input2` segment ids, `input3` 1 for a token and 0 for
    padding. Outputs: `output1` float32 [batch, sequence, vocabulary], the masked language model's logits at every
    place; `output2` float32 [batch, 2], the logits of "is the next sentence" and "is a random one".
    The longest sequence is noted in the model's metadata as `context_length`. Weights are drawn from N(0, 0.02²).
    """
    width, vocab_size = options.shape.width, options.shape.vocab_size
    writer = GraphWriter(f"bert_{options.size}", options.opset, options.seed)
    token_ids, segment_ids, mask = (
        writer.input(name, ir.DataType.INT64, ["batch", "sequence"]) for name in ("input1", "input2", "input3")
    )
    lowering = _lower_padding(writer, mask)
    with writer.scope("bert"):
        with writer.scope("embeddings"):
            table = writer.weight("word_embeddings.weight", (vocab_size, width), normal(STD))
            x = _embed(writer, table, token_ids, segment_ids, options)
        for layer in range(options.shape.layers):
            with writer.scope(f"encoder.layer.{layer}"):
                x = _layer(writer, x, lowering, options)
        with writer.scope("pooler"):
            first = writer.op("Gather", x, writer.integers(0), axis=1)
            pooled = writer.op("Tanh", linear(writer, first, "dense", width, width, normal(STD)))
    with writer.scope("cls"):
        words = _predict_words(writer, x, table, options)
        next_sentence = linear(writer, pooled, "seq_relationship", width, 2, normal(STD))
    outputs = [writer.op("Identity", words, name="output1"), writer.op("Identity", next_sentence, name="output2")]
    shapes: list[list[int | str]] = [["batch", "sequence", vocab_size], ["batch", 2]]
    longest = {"context_length": str(options.shape.context_length)}
    return writer.finish(list(zip(outputs, shapes, strict=True)), metadata=longest)


def _lower_padding(writer: GraphWriter, mask: ir.Value) -> ir.Value:
    """[B, S] of 1 and 0 -> [B, 1, 1, S]: 0 for a token, a very negative score for padding."""
    with writer.scope("padding"):
        kept = writer.op("Cast", writer.op("Unsqueeze", mask, writer.integers([1, 2])), to=ir.DataType.FLOAT.value)
        return writer.op("Mul", writer.op("Sub", writer.number(1.0), kept), writer.number(MASKED_SCORE))


def _embed(
    writer: GraphWriter, table: ir.Value, token_ids: ir.Value, segment_ids: ir.Value, options: BertOptions
) -> ir.Value:
    width = options.shape.width
    places = writer.weight("position_embeddings.weight", (options.shape.context_length, width), normal(STD))
    segments = writer.weight("token_type_embeddings.weight", (options.segments, width), normal(STD))
    x = writer.op("Add", writer.op("Gather", table, token_ids), writer.op("Gather", segments, segment_ids))
    x = writer.op("Add", x, writer.op("Gather", places, count_positions(writer, token_ids)))
    return dropout(writer, layer_norm(writer, x, "LayerNorm", width, EPSILON), options.dropout)


def _layer(writer: GraphWriter, x: ir.Value, lowering: ir.Value, options: BertOptions) -> ir.Value:
    width = options.shape.width
    with writer.scope("attention"):
        attended = _attention(writer, x, lowering, options)
        with writer.scope("output"):
            attended = linear(writer, attended, "dense", width, width, normal(STD))
            attended = writer.op("Add", dropout(writer, attended, options.dropout), x)
            x = layer_norm(writer, attended, "LayerNorm", width, EPSILON)
    with writer.scope("intermediate"):
        hidden = gelu(writer, linear(writer, x, "dense", width, 4 * width, normal(STD)))
    with writer.scope("output"):
        hidden = linear(writer, hidden, "dense", 4 * width, width, normal(STD))
        hidden = writer.op("Add", dropout(writer, hidden, options.dropout), x)
        return layer_norm(writer, hidden, "LayerNorm", width, EPSILON)


def _attention(writer: GraphWriter, x: ir.Value, lowering: ir.Value, options: BertOptions) -> ir.Value:
    width = options.shape.width
    head_width = width // options.shape.heads
    with writer.scope("self"):
        query, key, value = (
            split_heads(writer, linear(writer, x, name, width, width, normal(STD)), head_width)
            for name in ("query", "key", "value")
        )
        scores = writer.op("Add", attention_scores(writer, query, key, head_width), lowering)
        return merge_heads(writer, attend(writer, scores, value, options.dropout))


def _predict_words(writer: GraphWriter, x: ir.Value, table: ir.Value, options: BertOptions) -> ir.Value:
    """The masked language model's head: one more layer, then the embedding's transpose and its own bias."""
    width = options.shape.width
    with writer.scope("predictions"):
        with writer.scope("transform"):
            x = gelu(writer, linear(writer, x, "dense", width, width, normal(STD)))
            x = layer_norm(writer, x, "LayerNorm", width, EPSILON)
        bias = writer.weight("bias", (options.shape.vocab_size,), constant(0.0))
        return writer.op("Add", writer.op("MatMul", x, writer.op("Transpose", table, perm=[1, 0])), bias)
