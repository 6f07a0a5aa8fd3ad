"""Attention masks of sequences that hold several samples, computed from a number per token in the training graph.

The mask of a sequence has as many elements as the square of its length; in the data it would be most of a shard.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.nodes.node_writer import NodeWriter
from onward.spelling import did_you_mean

_OLDEST_OPSET = 11
_NUMBERS = frozenset({ir.DataType.BOOL, ir.DataType.INT64, ir.DataType.INT32})


def compute_segment_masks(model: ir.Model, features: Mapping[str, str]) -> tuple[str, ...]:
    """Replaces masks among the inputs by nodes that compute them, in place; the exported model keeps its inputs.

    A token sees itself and the earlier tokens of its segment: true or 1 there, false or 0 elsewhere; or, where the mask
    is of floats, 0 there and the lowest number elsewhere, to be added to scores.

    Args:
        model: prepared for lowering.
        features: input `[batch, 1, sequence, sequence]`, or without the 1 -> feature `[batch, sequence]` with the
            number of each token's segment, an input of the model from then on.

    Returns:
        The constants that they are computed with, which never train.

    Raises:
        ModelError: no such input, or none of this shape and type.
    """
    if not features:
        return ()
    writer = NodeWriter(model, "onward_segments_")
    inputs = {str(value.name): value for value in model.graph.inputs}
    for name, feature in features.items():
        mask, segments = _mask(model, name, inputs), inputs.get(feature)
        if segments is None:
            assert mask.shape is not None
            shape = ir.Shape([mask.shape[0], mask.shape[-1]])
            segments = ir.Value(name=feature, type=ir.TensorType(ir.DataType.INT64), shape=shape)
            model.graph.inputs.append(segments)
            inputs[feature] = segments
        computed = _computed(writer, segments, mask)
        computed.type, computed.shape = mask.type, mask.shape
        mask.replace_all_uses_with(computed, replace_graph_outputs=True)
        model.graph.inputs.remove(mask)
    model.graph.sort()
    return tuple(writer.constants)


def _mask(model: ir.Model, name: str, inputs: Mapping[str, ir.Value]) -> ir.Value:
    where = f"data.segment_masks names {name!r}"
    if name not in inputs:
        raise ModelError(
            f"{where}; the inputs of the model are {', '.join(map(repr, inputs))}.{did_you_mean(name, inputs)}"
        )
    mask, opset = inputs[name], model.opset_imports.get("", 0)
    shape = [size if isinstance(size, int) else size.value for size in mask.shape or ()]
    is_mask = len(shape) == 3 or (len(shape) == 4 and (shape[1] == 1 or not isinstance(shape[1], int)))
    fixed = {size if isinstance(size, int) else None for size in shape[-2:]}
    is_mask = is_mask and len(fixed) == 1  # a square, as far as the export says
    if not is_mask or mask.dtype is None or not (mask.dtype in _NUMBERS or mask.dtype.is_floating_point()):
        kind = "of unknown type" if mask.dtype is None else mask.dtype.name.lower()
        raise ModelError(
            f"{where}, which is {kind} [{', '.join(map(str, shape))}]; expected a mask [batch, 1, sequence, sequence]. "
            "Export the model with such an input, or pack without --several-per-sequence and remove the entry."
        )
    if opset < _OLDEST_OPSET:
        raise ModelError(f"{where}, and the model has opset {opset}; export it with opset {_OLDEST_OPSET} or newer.")
    return mask


def _computed(writer: NodeWriter, segments: ir.Value, mask: ir.Value) -> ir.Value:
    rows, columns = writer.unsqueeze(segments, 2), writer.unsqueeze(segments, 1)
    size = writer.squeeze(writer.size_of(segments, 1), 0)
    places = writer.apply("Range", writer.constant(0, "first"), size, writer.constant(1, "step"), name="places")
    later = writer.apply("Less", writer.unsqueeze(places, 1), writer.unsqueeze(places, 0), name="later")
    sees = writer.apply("And", writer.apply("Equal", rows, columns), writer.apply("Not", later), name="sees")
    if len(mask.shape or ()) == 4:
        sees = writer.unsqueeze(sees, 1)
    assert mask.dtype is not None
    if mask.dtype in _NUMBERS:
        return sees if mask.dtype is ir.DataType.BOOL else writer.cast(sees, mask.dtype)
    kind = mask.dtype.numpy()
    lowest = float(ir.DataType(mask.dtype).min) if kind.kind == "V" else float(np.finfo(kind).min)
    ends = [writer.constant(number, name, kind) for number, name in ((0, "zero"), (lowest, "lowest"))]
    return writer.apply("Where", sees, *ends, name="mask")
