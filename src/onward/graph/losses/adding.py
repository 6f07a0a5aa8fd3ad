"""Adding what training minimizes to a model, as ONNX nodes of the model's own opset.

The loss is float32 of rank 0, whatever type the model computes in; labels become further inputs of the graph.
"""

from __future__ import annotations

import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.losses.spec import LossNames, LossSpec
from onward.graph.losses.writer import LossWriter
from onward.losses import registry

OLDEST_OPSET = 7


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
    ways = {kind.name: kind.add for kind in registry.LOSSES if kind.add is not None}
    if spec.type not in ways:
        raise ModelError(f"loss.type is {spec.type!r}; expected one of {', '.join(ways)}.")
    return ways[spec.type](LossWriter(model, spec, count_correct))
