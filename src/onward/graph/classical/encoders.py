"""Encoders of ai.onnx.ml: numbers and categories replaced by other numbers, from tables that never train."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.classical.rewriting import DOMAIN, NodeRewriter
from onward.graph.nodes.structure import ML_DOMAIN
from onward.spelling import shortened

_TABLE = "the table of an encoder"
_LABELS_SHOWN = 10
_NAN_IS_KEY_SINCE = 4


def rewrite_imputer(at: NodeRewriter) -> None:
    """Another number where the input is the one that stands for a missing value, which may be NaN."""
    value = at.input()
    floats, ints = at.floats("imputed_value_floats"), at.ints("imputed_value_int64s")
    if bool(floats) == bool(ints):
        raise ModelError(f"{at.what} must have one of imputed_value_floats and imputed_value_int64s. Export it again.")
    if floats:
        attribute = at.node.attributes.get("replaced_value_float")
        missing = 0.0 if attribute is None else attribute.as_float()
        dtype: type = np.float64 if value.dtype is ir.DataType.DOUBLE else np.float32
        table = at.constant(floats, "imputed", dtype, "the values that stand in for missing ones")
        is_missing = (
            at.apply("IsNaN", value)
            if np.isnan(missing)
            else at.apply("Equal", value, at.constant(missing, "missing", dtype))
        )
    else:
        dtype = np.int32 if value.dtype is ir.DataType.INT32 else np.int64
        table = at.constant(ints, "imputed", dtype)
        is_missing = at.apply("Equal", value, at.constant(at.integer("replaced_value_int64"), "missing", dtype))
    at.finish(at.apply("Where", is_missing, table, value))


def rewrite_binarizer(at: NodeRewriter) -> None:
    """1 above a threshold, else 0, in the type of the input."""
    attribute = at.node.attributes.get("threshold")
    threshold = 0.0 if attribute is None else attribute.as_float()
    value = at.input()
    dtype = value.dtype or ir.DataType.FLOAT
    above = at.apply("Greater", value, at.constant(threshold, "threshold", dtype.numpy()))
    at.finish(at.cast(above, dtype))


def rewrite_one_hot_encoder(at: NodeRewriter) -> None:
    """A vector for every category: 1 at its place, 0 elsewhere; unknown ones are all 0, or refused by `zeros` = 0."""
    categories = at.ints("cats_int64s")
    if not categories:
        raise ModelError(f"{at.what} has no categories. Export it again.")
    table = at.constant(categories, "categories", np.int64)
    value = at.input()
    integers = at.cast(value, ir.DataType.INT64)
    result = at.apply("OneHotCategories", integers, table, domain=DOMAIN, what="one_hot", zeros=at.integer("zeros", 1))
    given = value.shape
    if given is not None and at.node.outputs[0].shape is None:
        at.node.outputs[0].shape = ir.Shape([*given, len(categories)])
    at.finish(result)


def rewrite_label_encoder(at: NodeRewriter) -> None:
    """Keys looked up in a table, numbers for numbers; an unknown key gives the default."""
    keys = _numbers(at, "keys", ("int64s", "floats"))
    values = _numbers(at, "values", ("int64s", "floats"))
    if keys is None or values is None or len(keys) != len(values):
        raise ModelError(
            f"{at.what} has {0 if keys is None else len(keys)} numeric keys for "
            f"{0 if values is None else len(values)} values; expected one value per key. Export it again."
        )
    order = np.argsort(keys, kind="stable")
    # Of equal keys onnxruntime takes the first; NaN, which sorts last, is a key since version 4 of the domain.
    first = np.concatenate([[True], keys[order][1:] != keys[order][:-1]]) if len(keys) else np.zeros(0, bool)
    if at.writer.model.opset_imports[ML_DOMAIN] < _NAN_IS_KEY_SINCE and np.issubdtype(keys.dtype, np.floating):
        first &= ~np.isnan(keys[order])
    sorted_keys, sorted_values = keys[order][first], values[order][first]
    result = at.apply(
        "Lookup",
        at.input(),
        at.constant(sorted_keys, "keys", keys.dtype, _TABLE),
        at.constant(sorted_values, "values", values.dtype, _TABLE),
        at.constant(_default(at, values.dtype), "default", values.dtype, _TABLE),
        domain=DOMAIN,
    )
    at.finish(result)


def _numbers(at: NodeRewriter, side: str, kinds: Sequence[str]) -> np.ndarray | None:
    tensor = at.node.attributes.get(f"{side}_tensor")
    if tensor is not None:
        return np.asarray(tensor.as_tensor().numpy()).reshape(-1)
    for kind in kinds:
        if f"{side}_{kind}" in at.node.attributes:
            numbers = at.ints(f"{side}_{kind}") if kind == "int64s" else at.floats(f"{side}_{kind}")
            return np.asarray(numbers, np.int64 if kind == "int64s" else np.float32)
    return None


def _default(at: NodeRewriter, dtype: np.dtype) -> np.ndarray:
    tensor = at.node.attributes.get("default_tensor")
    if tensor is not None:
        return np.asarray(tensor.as_tensor().numpy()).reshape(())
    if np.issubdtype(dtype, np.integer):
        return np.asarray(at.integer("default_int64", -1))
    attribute = at.node.attributes.get("default_float")
    return np.asarray(-0.0 if attribute is None else attribute.as_float())


def rewrite_zip_map(at: NodeRewriter) -> None:
    """The numbers of the maps as the tensor that they are made of, [N, classes]: classes in the order of the labels."""
    labels = at.strings("classlabels_strings") or at.ints("classlabels_int64s")
    shown = shortened(map(repr, labels), _LABELS_SHOWN)
    at.done.notes.append(
        f"the output {at.node.outputs[0].name!r} is a sequence of maps in the file; in training it is the tensor "
        f"behind them, with a row per sample and a column per class: {shown}."
    )
    at.node.outputs[0].type = at.node.outputs[0].type or ir.TensorType(ir.DataType.FLOAT)
    at.finish(at.apply("Identity", at.input(), what="numbers"))


def rewrite_normalizer(at: NodeRewriter) -> None:
    """The L1 norm of what a softmax gives is 1: dividing by it again changes nothing. Others stay."""
    source = at.input()
    while (node := source.producer()) is not None and node.op_type in ("Identity", "Cast") and node.domain == "":
        inner = node.inputs[0]
        if inner is None or (node.op_type == "Cast" and node.attributes["to"].as_int() != int(ir.DataType.FLOAT)):
            break
        source = inner
    if at.text("norm", "MAX") == "L1" and node is not None and (node.domain, node.op_type) == ("", "Softmax"):
        at.finish(at.apply("Identity", at.input(), what="normalized"))
    elif at.node.outputs[0].shape is None:
        at.node.outputs[0].shape = at.input().shape
