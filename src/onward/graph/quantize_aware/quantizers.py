"""Where a model is quantized: one value each, with the names of scale and zero point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir


@dataclass(frozen=True, kw_only=True)
class Quantizer:
    """A value that is quantized and dequantized.

    Attributes:
        value: what is quantized: a weight, or a value that nodes compute.
        scale, zero_point: initializers that say how.
        is_weight: whether it is a weight.
        axis: of the channels that have their own scales; None: one scale for all.
        largest: the greatest integer above the zero point.
        is_signed: whether values on both sides of zero are expected.
        elements: how many numbers share a scale; of an activation, in one sample.
        is_calibrated: whether the scale is known before training.
        observer: how training finds the scale.
        largest_scale: what it is at most; None: any.
    """

    value: str
    scale: str
    zero_point: str
    is_weight: bool
    axis: int | None
    largest: int
    is_signed: bool
    elements: int
    is_calibrated: bool
    observer: Literal["lsq", "moving_average"]
    largest_scale: float | None = None


QUANTIZERS = "onward.quantizers"
"""Where a model keeps, in memory alone, what insert_quantizers put into it."""

NOTES = "onward.quantize_aware_notes"
"""Where it keeps, in memory alone, what the user should know of that."""


def quantizers_of(model: ir.Model) -> tuple[Quantizer, ...]:
    """What is quantized in a model that `quantize_aware_model` gave."""
    found: tuple[Quantizer, ...] = model.meta.get(QUANTIZERS, ())
    return found


def quantizing_nodes(graph: ir.Graph) -> dict[str, ir.Node]:
    """The first node that quantizes each value, by the name of the value."""
    found: dict[str, ir.Node] = {}
    for node in graph:
        if node.op_type == "QuantizeLinear" and node.domain == "" and node.inputs[0] is not None:
            found.setdefault(str(node.inputs[0].name), node)
    return found
