"""What an export lost or changed that matters for training, one sentence each, for the user."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import onnx_ir as ir

from onward.graph.nodes import provenance
from onward.graph.weights.evidence import folded_parameters
from onward.graph.weights.names import WeightNames
from onward.graph.weights.split_parameters import notes_on_split_parameters
from onward.spelling import shortened

_SHOWN = 6
"""So many names are listed; the rest is counted."""


_HOW_TO_KEEP = {
    True: "torch.onnx.export(..., optimize=False)",
    False: "torch.onnx.export(..., training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False)",
}
"""Whether the exporter noted the traced calls (torch's newer one) -> how to export without the change."""


def notes_on_export(model: ir.Model, weights: Collection[str], known_as: WeightNames) -> tuple[str, ...]:
    """Biases dropped because they were zero, batch normalizations folded away, weights that were computed at export."""
    notes = [*_note_on_simplification(model)]
    folded = [node for node in model.graph if _holds_batch_norm(node)]
    without_bias = [node for node in model.graph if provenance.lost_bias(node) and node not in folded]
    if without_bias:
        one = len(without_bias) == 1
        notes.append(
            f"{_listed('node', [provenance.shown_node(node) for node in without_bias])} {'was' if one else 'were'} "
            f"exported without {'its bias, which was' if one else 'their biases, which were'} all zeros; "
            f"{'it' if one else 'they'} cannot be trained. torch.onnx.export(..., optimize=False) keeps them."
        )
    if folded:
        notes.append(
            "batch normalization was folded into "
            f"{_listed('convolution', [provenance.shown_node(node) for node in folded])}; its weights and running "
            f"statistics are gone. {_HOW_TO_KEEP[bool(provenance.call(folded[0]))]} keeps them."
        )
    for name in weights:
        value = model.graph.initializers.get(name)
        sources = () if value is None else provenance.folded_sources(value)
        parameters = [] if value is None else folded_parameters(value)
        if parameters and (
            len(sources) > 1 or (value is not None and value.shape is not None and len(value.shape) != 2)
        ):
            notes.append(
                f"{known_as.shown(name)!r} was computed at export from {_quoted(parameters)}; it trains as a separate "
                f"weight{_said_of_rows(value)}."
            )
    return (*notes, *notes_on_split_parameters(model.graph))


def _note_on_simplification(model: ir.Model) -> tuple[str, ...]:
    removed = model.metadata_props.get(provenance.REMOVED_BY_ONNXSIM, "")
    names = re.findall(r"BatchNormalization \(([^)]*)\)", removed)
    if not names:
        return ()
    return (
        f"onnxsim folded batch normalization into the layers before it: {_listed('node', names)}; weights and running "
        "statistics are gone. onnxsim.simplify(..., skipped_optimizers=['fuse_bn_into_conv']) keeps them.",
    )


def _said_of_rows(value: ir.Value | None) -> str:
    """What is lost where the exporter repeated a parameter for each sample of a batch of fixed size."""
    if value is None or value.const_value is None or len(value.const_value.shape) < 2:
        return ""
    array = value.const_value.numpy()
    if len(array) < 2 or not (array[0] == array[1]).all() or not (array == array[:1]).all():
        return ""
    if (array[0] == array.flat[0]).all():
        return ""
    return f", and each of its {len(array)} equal rows separately; a dynamic batch axis at export keeps one"


def _holds_batch_norm(node: ir.Node) -> bool:
    if node.op_type not in ("Conv", "ConvTranspose", "Gemm"):
        return False
    if node.metadata_props.get(provenance.REWRITTEN_BY, "").startswith("FuseBatchNorm"):
        return True
    if "batch_norm" in provenance.call(node):
        return True
    # Folding computes weight and bias; a kernel that was only transposed (Keras) has a new name, its bias has not.
    names = [str(value.name) for value in node.inputs[1:] if value is not None]
    return len(names) == 2 and all(re.fullmatch(r"onnx::Conv(Transpose)?_\d+", name) for name in names)


def _listed(what: str, names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{what} {names[0]!r}"
    return f"{len(names)} {what}s ({_quoted(names)})"


def _quoted(names: Sequence[str]) -> str:
    return shortened(map(repr, names), _SHOWN)
