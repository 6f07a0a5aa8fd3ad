"""Adding what training minimizes to a model, as ONNX nodes of the model's own opset.

The loss is float32 of rank 0, whatever type the model computes in; labels become further inputs of the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import get_args

import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.losses import terms
from onward.graph.losses.ctc import add_ctc, check_blank, find_axes
from onward.graph.losses.logits import LossInput, for_binary_cross_entropy, for_cross_entropy
from onward.graph.losses.spec import LossNames, LossSpec, LossType
from onward.graph.losses.user_graph import merge_loss_graph
from onward.graph.losses.values import add_label, describe_shape, find_prediction, publish
from onward.graph.nodes.node_writer import NodeWriter

OLDEST_OPSET = 7
PREFIX = "loss/"
"""What the names of all nodes and initializers of a loss begin with."""


def add_loss(model: ir.Model, spec: LossSpec, *, count_correct: bool = False) -> LossNames:
    """Adds a loss to a model in place: label inputs, nodes named `loss/...`, and outputs.

    Args:
        model: from `read_model`, or prepared for lowering; opset 7 or newer.
        spec: which loss, of which output and which label.
        count_correct: also write how many labels the prediction hits, for losses of classes.

    Raises:
        ModelError: the prediction is no output of the model, a label clashes with a value of the model or has the
            wrong type or shape, an axis or the number of class weights does not fit, or fields that the type of
            loss needs are missing.
    """
    opset = model.opset_imports.get("", 0)
    if opset < OLDEST_OPSET:
        raise ModelError(
            f"a loss cannot be added to a model of opset {opset}; opset {OLDEST_OPSET} is the oldest. "
            "Convert it with onnx.version_converter, or export it again."
        )
    if spec.reduction not in ("mean", "sum"):
        raise ModelError(f"loss.reduction is {spec.reduction!r}; expected 'mean' or 'sum'.")
    writer = NodeWriter(model, PREFIX)
    if spec.type == "softmax_cross_entropy":
        return _add_cross_entropy(writer, spec, count_correct)
    if spec.type == "ctc":
        return _add_ctc(writer, spec, count_correct)
    if spec.type in ("mean_squared_error", "l1", "binary_cross_entropy"):
        return _add_elementwise(writer, spec, count_correct)
    if spec.type == "bert":
        return _add_bert(writer, spec, count_correct)
    if spec.type == "output":
        return _use_output(writer, spec)
    if spec.type == "graph":
        return _add_loss_graph(writer, spec)
    raise ModelError(f"loss.type is {spec.type!r}; expected one of {', '.join(get_args(LossType))}.")


def _add_cross_entropy(writer: NodeWriter, spec: LossSpec, count_correct: bool) -> LossNames:
    logits = find_prediction(writer, _required(spec.prediction, spec, "prediction"), "prediction")
    label_name = _required(spec.label, spec, "label")
    axis = _class_axis(logits, spec.class_axis)
    _check_class_weights(logits, axis, spec.class_weights)
    source = for_cross_entropy(writer, logits, axis)
    logits, dtype, classes = source.value, terms.computing_type(source.value), {}
    if spec.dense_labels:
        if spec.ignore_index is not None:
            raise ModelError("loss.ignore_index has no meaning for dense_labels, which are probabilities; remove it.")
        labels = add_label(writer, label_name, _label_type(spec, dtype, terms.FLOAT_TYPES), logits.shape)
        values = terms.to_computing_type(writer, logits, dtype)
        targets = _like(writer, terms.to_computing_type(writer, labels, dtype), logits)
        loss = terms.dense_cross_entropy(writer, values, targets, axis, spec.class_weights, spec.reduction, dtype)
        counts = _counts_of_dense(writer, values, targets, axis) if count_correct else ()
    else:
        shape = None if logits.shape is None else [d for i, d in enumerate(logits.shape) if i != axis]
        labels = add_label(writer, label_name, _label_type(spec, ir.DataType.INT64, terms.INTEGER_TYPES), shape)
        rows = terms.class_rows(writer, terms.to_computing_type(writer, logits, dtype), axis)
        flat, classes = _as_rows(writer, labels, rows), _class_counts((labels, rows))
        loss = terms.cross_entropy(
            writer,
            rows,
            flat,
            ignore_index=spec.ignore_index,
            class_weights=spec.class_weights,
            reduction=spec.reduction,
            dtype=dtype,
        )
        counts = terms.count_correct(writer, rows, flat, spec.ignore_index) if count_correct else ()
    names = _finish(writer, loss, dtype, (str(labels.name),), counts=counts)
    return replace(names, classes=classes, notes=source.notes, holds_probabilities=source.holds_probabilities)


def _add_ctc(writer: NodeWriter, spec: LossSpec, count_correct: bool) -> LossNames:
    prediction = find_prediction(writer, _required(spec.prediction, spec, "prediction"), "prediction")
    axes = find_axes(writer, prediction, spec.class_axis, spec.time_axis)
    check_blank(prediction, axes, spec.blank)
    source = for_cross_entropy(writer, prediction, axes.classes if prediction.shape is not None else -1, "ctc")
    dtype, int64 = terms.computing_type(source.value), ir.DataType.INT64
    batch = None if prediction.shape is None else prediction.shape[axes.batch]
    shape = [batch, ir.SymbolicDim("label_length")]
    label_type = _label_type(spec, int64, terms.INTEGER_TYPES)
    labels = add_label(writer, _required(spec.label, spec, "label"), label_type, shape)
    lengths = None if not spec.prediction_lengths else add_label(writer, spec.prediction_lengths, int64, [batch])
    logits = terms.to_computing_type(writer, source.value, dtype)
    loss, counts = add_ctc(
        writer,
        *(logits, labels, lengths),
        axes,
        blank=spec.blank,
        ignore_index=spec.ignore_index,
        reduction=spec.reduction,
        zero_infinity=spec.zero_infinity is not False,
        count_correct=count_correct,
    )
    names = _finish(writer, loss, dtype, tuple(str(one.name) for one in (labels, lengths) if one), counts=counts)
    classes = terms.known_size(prediction, axes.classes)
    known = {} if classes is None else {str(labels.name): classes}
    return replace(names, classes=known, notes=source.notes, holds_probabilities=source.holds_probabilities)


def _class_counts(*labels: tuple[ir.Value, terms.Rows]) -> dict[str, int]:
    return {str(label.name): rows.classes for label, rows in labels if rows.classes is not None}


def _as_rows(writer: NodeWriter, labels: ir.Value, rows: terms.Rows) -> ir.Value:
    """Labels as int64 (int32 stays, where the operators take it), one for each row of logits."""
    if labels.dtype not in (ir.DataType.INT64, ir.DataType.INT32) or writer.opset < 12:
        labels = terms.to_computing_type(writer, labels, ir.DataType.INT64)
    return writer.reshape(labels, [-1], name="label_rows") if rows.flat else labels


def _counts_of_dense(writer: NodeWriter, logits: ir.Value, targets: ir.Value, axis: int) -> tuple[ir.Value, ir.Value]:
    best = terms.class_rows(writer, targets, axis)
    labels = writer.apply("ArgMax", best.logits, axis=1, keepdims=0)
    return terms.count_correct(writer, terms.class_rows(writer, logits, axis), labels, None)


def _add_elementwise(writer: NodeWriter, spec: LossSpec, count_correct: bool) -> LossNames:
    prediction = find_prediction(writer, _required(spec.prediction, spec, "prediction"), "prediction")
    if spec.class_weights is not None or spec.ignore_index is not None:
        raise ModelError(f"loss.class_weights and loss.ignore_index do not belong to {spec.type}; remove them.")
    source = LossInput(prediction, spec.from_logits)
    if spec.type == "binary_cross_entropy":
        source = for_binary_cross_entropy(writer, prediction, spec.from_logits)
        prediction = source.value
    dtype = terms.computing_type(prediction)
    allowed = terms.FLOAT_TYPES | terms.INTEGER_TYPES | {ir.DataType.BOOL}
    label_type = _label_type(spec, dtype, allowed)
    labels = add_label(writer, _required(spec.label, spec, "label"), label_type, prediction.shape, allowed)
    values = terms.to_computing_type(writer, prediction, dtype)
    targets = _like(writer, terms.to_computing_type(writer, labels, dtype), prediction)
    counts: tuple[ir.Value, ...] = ()
    if spec.type == "mean_squared_error":
        loss = terms.squared_error(writer, values, targets, spec.reduction)
    elif spec.type == "l1":
        loss = terms.absolute_error(writer, values, targets, spec.reduction)
    else:
        loss = terms.binary_cross_entropy(writer, values, targets, source.from_logits, spec.reduction, dtype)
        counts = terms.count_correct_binary(writer, values, targets, source.from_logits) if count_correct else ()
    names = _finish(writer, loss, dtype, (str(labels.name),), counts=counts)
    return replace(names, notes=source.notes, holds_probabilities=source.holds_probabilities)


def _like(writer: NodeWriter, labels: ir.Value, prediction: ir.Value) -> ir.Value:
    """Labels in the shape of the prediction, so that `[B]` against `[B, 1]` does not broadcast to `[B, B]`."""
    shaped = writer.reshape(labels, writer.apply("Shape", prediction), name="label_like_prediction")
    shaped.shape, shaped.type = prediction.shape, labels.type
    return shaped


def _add_bert(writer: NodeWriter, spec: LossSpec, count_correct: bool) -> LossNames:
    logits = find_prediction(writer, spec.masked_lm_prediction, "masked_lm_prediction", rank=3)
    pair = find_prediction(writer, spec.next_sentence_prediction, "next_sentence_prediction", rank=2)
    sources = (for_cross_entropy(writer, logits, -1 if logits.shape is None else 2), for_cross_entropy(writer, pair, 1))
    logits, pair = (source.value for source in sources)
    dtype, int64 = terms.computing_type(logits), ir.DataType.INT64
    batch = None if logits.shape is None else logits.shape[0]
    masked = [batch, ir.SymbolicDim("masked")]
    positions = add_label(writer, spec.masked_lm_positions, int64, masked)
    ids = add_label(writer, spec.masked_lm_ids, int64, masked)
    next_label = add_label(writer, spec.next_sentence_label, int64, [batch])
    gathered = terms.gather_positions(
        writer,
        terms.to_computing_type(writer, logits, dtype),
        terms.to_computing_type(writer, positions, int64),
    )
    gathered.shape = None if logits.shape is None else ir.Shape([*masked, logits.shape[2]])
    gathered.type = logits.type
    rows = terms.class_rows(writer, gathered, -1 if gathered.shape is None else 2)
    flat = _as_rows(writer, ids, rows)
    ignore_index = 0 if spec.ignore_index is None else spec.ignore_index
    _check_class_weights(logits, -1, spec.class_weights)
    mlm = terms.cross_entropy(
        writer,
        rows,
        flat,
        ignore_index=ignore_index,
        class_weights=spec.class_weights,
        reduction=spec.reduction,
        dtype=dtype,
    )
    pair_rows = terms.class_rows(writer, terms.to_computing_type(writer, pair, dtype), 1)
    pair_labels = _as_rows(writer, next_label, pair_rows)
    nsp = terms.cross_entropy(
        writer, pair_rows, pair_labels, ignore_index=None, class_weights=None, reduction=spec.reduction, dtype=dtype
    )
    total = writer.apply("Add", mlm, nsp, name="total")
    counts = terms.count_correct(writer, rows, flat, ignore_index) if count_correct else ()
    labels = tuple(str(value.name) for value in (positions, ids, next_label))
    parts = {"mlm_loss": mlm, "nsp_loss": nsp}
    names = _finish(writer, total, dtype, labels, name="total_loss", parts=parts, counts=counts)
    notes = tuple(note for source in sources for note in source.notes)
    return replace(names, classes=_class_counts((ids, rows), (next_label, pair_rows)), notes=notes)


def _use_output(writer: NodeWriter, spec: LossSpec) -> LossNames:
    loss = find_prediction(writer, _required(spec.prediction, spec, "prediction"), "prediction")
    if loss.dtype is ir.DataType.FLOAT and loss.shape is not None and len(loss.shape) == 0:
        is_output = loss.is_graph_output()
        return LossNames(loss=str(loss.name) if is_output else publish(writer, loss, str(loss.name)))
    dtype = terms.computing_type(loss)
    value = terms.to_computing_type(writer, loss, dtype)
    return _finish(writer, writer.reduce_all(value, spec.reduction), dtype, ())


def _add_loss_graph(writer: NodeWriter, spec: LossSpec) -> LossNames:
    if spec.graph is None:
        raise ModelError("loss.type is 'graph', but loss.graph, the path of the ONNX loss model, is missing.")
    merged = merge_loss_graph(writer, spec.graph, spec.graph_inputs, spec.graph_output, spec.limits)
    dtype = terms.computing_type(merged.loss)
    value = terms.to_computing_type(writer, merged.loss, dtype)
    if value.shape is None or len(value.shape) > 0:
        value = writer.reduce_all(value, spec.reduction)
    names = _finish(writer, value, dtype, merged.labels)
    parts = tuple(publish(writer, part, name) for name, part in merged.parts.items())
    return replace(names, parts=parts)


def _finish(
    writer: NodeWriter,
    loss: ir.Value,
    dtype: ir.DataType,
    labels: tuple[str, ...],
    *,
    name: str = "loss",
    parts: Mapping[str, ir.Value] | None = None,
    counts: Sequence[ir.Value] = (),
) -> LossNames:
    """Names the loss and its parts and makes them outputs of the graph."""
    loss_name = publish(writer, loss, name, dtype)
    part_names = tuple(publish(writer, value, part, dtype) for part, value in (parts or {}).items())
    count_names = [publish(writer, value, str(value.name), ir.DataType.INT64) for value in counts]
    correct, counted = count_names if count_names else (None, None)
    return LossNames(
        loss=loss_name,
        parts=part_names,
        labels=labels,
        constants=tuple(writer.constants),
        correct=correct,
        counted=counted,
    )


def _required(value: str | None, spec: LossSpec, what: str) -> str:
    if not value:
        raise ModelError(f"loss.type is {spec.type!r}, but loss.{what} is missing; it names the {_MEANING[what]}.")
    return value


_MEANING = {"prediction": "output of the model that is compared", "label": "feature of the data to compare it with"}


def _class_axis(logits: ir.Value, axis: int) -> int:
    """The axis counted from the front; -1 where the rank is unknown and the last is meant."""
    if logits.shape is None:
        if axis != -1:
            raise ModelError(
                f"loss.class_axis is {axis}, but the rank of {logits.name!r} is unknown; use -1, the last."
            )
        return -1
    rank = len(logits.shape)
    if not -rank <= axis < rank:
        raise ModelError(
            f"loss.class_axis is {axis}, but {logits.name!r} has {rank} axes {describe_shape(logits)}; "
            f"expected {-rank} to {rank - 1}."
        )
    return axis % rank


def _check_class_weights(logits: ir.Value, axis: int, weights: Sequence[float] | None) -> None:
    if weights is None:
        return
    classes = terms.known_size(logits, axis)
    if classes is not None and len(weights) != classes:
        raise ModelError(
            f"loss.class_weights has {len(weights)} numbers, but {logits.name!r} {describe_shape(logits)} has "
            f"{classes} classes on axis {axis}; give one weight a class."
        )


def _label_type(spec: LossSpec, default: ir.DataType, allowed: Collection[ir.DataType]) -> ir.DataType:
    """The element type of the label input to add."""
    if spec.label_type is None:
        return default
    found = next((t for t in ir.DataType if t.name.lower() == spec.label_type.lower()), None)
    found = {"float32": ir.DataType.FLOAT, "float64": ir.DataType.DOUBLE}.get(spec.label_type.lower(), found)
    if found is None or found not in allowed:
        listed = ", ".join(sorted(t.name.lower() for t in allowed))
        raise ModelError(f"loss.label_type is {spec.label_type!r}; this loss takes {listed}.")
    return found
