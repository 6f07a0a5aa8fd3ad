"""BERT's pretraining: the cross entropy of masked tokens and that of the next sentence, added."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onward.losses.classes import (
    class_rows,
    count_correct,
    count_up,
    cross_entropy,
    known_size,
    label_rows,
    logits_before,
)
from onward.losses.kind import LossKind
from onward.losses.labels import LabelCount, LabelRange

if TYPE_CHECKING:
    import onnx_ir as ir

    from onward.graph.losses.spec import LossNames
    from onward.graph.losses.writer import LossWriter
    from onward.parameters import Loss


def _add(writer: LossWriter) -> LossNames:
    tokens = writer.prediction("masked_lm_prediction", rank=3)
    pair = writer.prediction("next_sentence_prediction", rank=2)
    tokens = logits_before(writer, tokens, -1 if tokens.shape is None else 2)
    pair = logits_before(writer, pair, 1)
    writer.compute_like(tokens)
    batch = None if tokens.shape is None else tokens.shape[0]
    masked = [batch, writer.dimension("masked")]
    positions = writer.class_labels("masked_lm_positions", masked)
    ids = writer.class_labels("masked_lm_ids", masked)
    next_label = writer.class_labels("next_sentence_label", [batch])
    gathered = _gather(writer, writer.computed(tokens), writer.integers(positions))
    writer.describe(gathered, tokens, None if tokens.shape is None else [*masked, tokens.shape[2]])
    rows = class_rows(writer, gathered, -1 if gathered.shape is None else 2)
    flat = label_rows(writer, ids, rows)
    writer.check_class_weights(tokens, -1)
    mlm = cross_entropy(writer, rows, flat, _padding(writer.spec), is_weighted=True)
    pair_rows = class_rows(writer, writer.computed(pair), 1)
    nsp = cross_entropy(writer, pair_rows, label_rows(writer, next_label, pair_rows), None)
    total = writer.apply("Add", mlm, nsp, name="total")
    counts = count_correct(writer, rows, flat, _padding(writer.spec))
    return writer.finish(total, name="total_loss", parts={"mlm_loss": mlm, "nsp_loss": nsp}, counts=counts)


def _gather(writer: LossWriter, values: ir.Value, positions: ir.Value) -> ir.Value:
    """Rows of `values` `[B, S, V]` at `positions` `[B, P]`, as `[B, P, V]`."""
    if writer.opset >= 12:
        return writer.apply("GatherND", values, writer.unsqueeze(positions, 2), batch_dims=1, name="at_positions")
    sequence = count_up(writer, values, 1, known_size(values, 1), "sequence")
    hit = writer.apply("Equal", writer.unsqueeze(positions, 2), sequence)
    return writer.apply("MatMul", writer.floats(hit), values, name="at_positions")


def _padding(loss: Loss) -> int:
    return 0 if loss.ignore_index is None else loss.ignore_index


def _label_range(loss: Loss, label: str, classes: int) -> LabelRange:
    return LabelRange(classes, _padding(loss) if label == loss.masked_lm_ids else None)


def _normalizer(loss: Loss) -> tuple[LabelCount | None, ...]:
    return LabelCount(loss.masked_lm_ids, _padding(loss), loss.class_weights), None


BERT = LossKind(
    name="bert",
    add=_add,
    required=(),
    reads=("ignore_index", "class_weights"),
    predictions=("masked_lm_prediction", "next_sentence_prediction"),
    labels=("masked_lm_positions", "masked_lm_ids", "next_sentence_label"),
    label_range=_label_range,
    normalizer=_normalizer,
)
