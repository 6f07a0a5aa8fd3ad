"""From an integer network to one that trains, ONNX to ONNX: quantized operators written out, integers as floats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.dequantization.operators import REWRITES
from onward.graph.dequantization.stored import remove_rounding, restore_weights
from onward.graph.dequantization.writing import RealWriter
from onward.graph.nodes.structure import MICROSOFT
from onward.graph.reading.model_file import ModelSource, read_model
from onward.parameters.limits import DEFAULT_LIMITS, Limits
from onward.spelling import shortened


@dataclass(frozen=True)
class Dequantized:
    """A network in real numbers.

    Attributes:
        model: the network; its inputs and outputs are as they were.
        operators: quantized operators that were written out, with how many.
        elements: how many stored integers became float parameters.
        left: quantized nodes that are not dequantized, since there is no float form of them here.
    """

    model: ir.Model
    operators: Mapping[str, int]
    elements: int
    left: tuple[str, ...]

    def describe(self) -> str:
        """What was done, in a sentence or two."""
        counted = ", ".join(f"{count} {name}" for name, count in sorted(self.operators.items()))
        text = f"{self.elements:,} stored integers are now float32 parameters"
        text = f"{counted} dequantized; {text}." if counted else f"{text}; no operator computed with integers."
        if self.left:
            text += f" Not dequantized, without a gradient: {shortened(self.left, 5)}."
        return text


def dequantize(source: ModelSource, *, keep_rounding: bool = True, limits: Limits = DEFAULT_LIMITS) -> Dequantized:
    """Writes a quantized network in real numbers, so that it trains.

    Args:
        source: a path, a `ModelProto`, or an onnx-ir model; it is not changed.
        keep_rounding: quantize and dequantize weights and activations as the network did (QDQ form): outputs are the
            same, and training is aware of the rounding. Else there is none: outputs differ by the quantization error.
        limits: what the model may ask of the machine.

    Raises:
        ModelError: the model cannot be read, or nothing in it is quantized.
    """
    model = read_model(source, limits)
    writer = RealWriter(model)
    operators: Counter[str] = Counter()
    left = []
    for node in list(model.graph):
        rewrite = REWRITES.get((node.domain, node.op_type))
        if rewrite is None:
            continue
        name, op_type = node.name, node.op_type
        if rewrite(writer, node):
            operators[op_type] += 1
        else:
            left.append(f"node {name!r} ({op_type})")
    elements = restore_weights(writer, keep_rounding)
    if not keep_rounding:
        remove_rounding(writer)
    if not operators and not elements:
        raise ModelError(
            "the model has no quantized operator and no stored integers that are dequantized; there is nothing to "
            "dequantize. Train it as it is."
        )
    _remove_unused(model)
    return Dequantized(model, dict(operators), elements, tuple(left))


def _remove_unused(model: ir.Model) -> None:
    """Takes out nodes and initializers that nothing reads any more, and the domain that is no longer used."""
    for node in reversed(list(model.graph)):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            model.graph.remove(node, safe=True)
    for name, value in list(model.graph.initializers.items()):
        if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
            model.graph.initializers.pop(name)
    if not any(node.domain == MICROSOFT for node in model.graph.all_nodes()) and not model.functions:
        model.opset_imports.pop(MICROSOFT, None)
