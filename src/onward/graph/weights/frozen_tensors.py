"""What does not train, in words: stored tensors grouped by the reason, with parameters and bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onward.graph.weights.names import WeightNames
from onward.graph.weights.quantized_weights import PACKED, UNPACKING, quantized_weights

_SHOWN = 3
_WAY_OUT = (
    "dequantize the model (onward export MODEL --dequantize qdq -o FILE) and train the result, or train the model from "
    "before quantization and quantize it afterwards (onward export --quantize)."
)
_UNREMARKABLE = (
    "a rank-0 constant", "a one-element constant", "a constant", "a Constant node", "a mask", "a table of angles",
    "an initial state", "a fixed input", "its name stands", "listed in", "no gradient", "no node", "not listed in",
    "running statistic",
)  # fmt: skip
_FINAL = ("no gradient", "no node", "running statistic", "its name stands")
"""How the reasons begin that no rule overrides."""

_BY_USER = ("listed in", "not listed in")
"""How the reasons begin that are not reported at the start of a run."""


@dataclass(frozen=True)
class FrozenGroup:
    """Tensors that do not train for one reason."""

    reason: str
    names: tuple[str, ...]
    elements: int
    bytes: int


def frozen_groups(graph: ir.Graph, frozen: Mapping[str, str]) -> tuple[FrozenGroup, ...]:
    """The tensors of `frozen` by their reason, those with most parameters first."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in frozen.items():
        by_reason.setdefault(reason, []).append(name)
    groups = []
    for reason, names in by_reason.items():
        stored = [graph.initializers[name].const_value for name in names if name in graph.initializers]
        sizes = [(tensor.size, tensor.nbytes) for tensor in stored if tensor is not None]
        groups.append(FrozenGroup(reason, tuple(names), sum(n for n, _ in sizes), sum(b for _, b in sizes)))
    return tuple(sorted(groups, key=lambda group: -group.elements))


def note_on_frozen(
    graph: ir.Graph, weights: Collection[str], frozen: Mapping[str, str], known_as: WeightNames
) -> tuple[str, ...]:
    """One sentence on what does not train and might be expected to; none where nothing is worth a word."""
    groups = [group for group in frozen_groups(graph, frozen) if not group.reason.startswith(_UNREMARKABLE)]
    if not groups:
        return ()
    stored = [graph.initializers[name].const_value for name in weights]
    trained = sum(tensor.size for tensor in stored if tensor is not None)
    still = sum(group.elements for group in groups)
    is_stored = any("stored as" in group.reason for group in groups)
    advice = f" Integers get no gradient: {_way_out(graph)}" if is_stored else ""
    return (
        f"{still:,} of {trained + still:,} parameters are not trainable: {_listed(groups, known_as)}. "
        f"`onward inspect` lists them; training.weights_to_train overrides this by exact name.{advice}",
    )


def _way_out(graph: ir.Graph) -> str:
    """What to do where weights are integers; products of integers by integers leave no place for an adapter."""
    readers = {use.node.op_type for name in quantized_weights(graph) for use in graph.initializers[name].uses()}
    is_adapted = readers & (PACKED | UNPACKING | {"DequantizeLinear"})
    return f"train adapters next to them (adapter.rank), {_WAY_OUT}" if is_adapted else _WAY_OUT


def why_nothing_trains(
    graph: ir.Graph, frozen: Mapping[str, str], known_as: WeightNames, constants: Collection[str] = ()
) -> str:
    """What to report to a user whose model has no trainable weights; no rule makes `constants` trainable."""
    groups = frozen_groups(graph, frozen)
    if not groups:
        return (
            "The model stores no float tensor that a node reads, so it has no trainable weights. Export it again with "
            "its parameters (torch.onnx.export(..., export_params=True))."
        )
    if all(group.reason.startswith(_BY_USER) for group in groups):
        advice = "Change training.weights_to_train or weights_not_to_train."
    elif any("stored as" in group.reason for group in groups):
        advice = f"Its weights are stored as integers, which get no gradient: {_way_out(graph)}"
    elif any(name not in constants and not reason.startswith(_FINAL) for name, reason in frozen.items()):
        advice = (
            "List those that are parameters in training.weights_to_train (weights_to_train=[...] of onward.to_torch)."
        )
    elif any("fitted trees" in group.reason for group in groups):
        advice = (
            "No rule makes them trainable. Fit them again with the library that made them, or train layers that "
            "compute with their results."
        )
    else:
        advice = "No rule makes them trainable. Train a model that has weights which a gradient reaches."
    return f"The model has no trainable weights. Its tensors are: {_listed(groups, known_as)}. {advice}"


def _listed(groups: Sequence[FrozenGroup], known_as: WeightNames) -> str:
    return "; ".join(
        f"{len(group.names)} x {group.reason} ({known_as.listed(group.names, _SHOWN)}; {group.elements:,} parameters, "
        f"{_bytes(group.bytes)})"
        for group in groups
    )


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
