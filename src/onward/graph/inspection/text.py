"""An inspection as plain text: aligned columns, the largest weights first, long lists counted."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Sequence

from onward.graph.cuts import CutPoint
from onward.graph.fusion.passes import Fusion
from onward.graph.inspection.facts import Inspection, Shape, Weight
from onward.graph.repair.split_weights import Tie
from onward.graph.weights.names import WeightNames
from onward.spelling import shortened
from onward.tables import aligned, section

_WIDTH = 110
_NAMES_SHOWN = 4
_SHOWN_RANK = 8


def render(inspection: Inspection, largest_weights: int = 20, cut_points: int = 24) -> str:
    """The text of `onward inspect`.

    Args:
        inspection: what to show.
        largest_weights: how many rows the table of weights has at most.
        cut_points: how many rows the table of cut points has at most.
    """
    sections = [
        _heading(inspection),
        section("Inputs", aligned([(t.name, t.type, _shape(t.shape)) for t in inspection.inputs])),
        section("Outputs", aligned([(t.name, t.type, _shape(t.shape)) for t in inspection.outputs])),
        section(
            "Symbolic dimensions", aligned([(d, shortened(p, _NAMES_SHOWN)) for d, p in inspection.dimensions.items()])
        ),
        _weights(inspection.weights, largest_weights),
        _frozen(inspection),
        section(
            "Ties", aligned((name, _relation(name, tie, inspection.known_as)) for name, tie in inspection.ties.items())
        ),
        _operators(inspection),
        _obstacles(inspection),
        _fusions(inspection.fusions),
        _joined(inspection.joined),
        _adapted(inspection),
        _cuts(inspection.cut_points, cut_points),
        section("Notes", [line for note in inspection.notes for line in _bullet(note)]),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _relation(copy: str, tie: Tie, known_as: WeightNames) -> str:
    return f"= {'its first row' if tie.weight == copy else known_as.shown(tie.weight)} {tie.relation}"


def _heading(inspection: Inspection) -> str:
    facts = [
        ", ".join(f"{domain} {version}" for domain, version in inspection.opsets.items()),
        f"IR version {inspection.ir_version}",
        f"written by {inspection.producer}" if inspection.producer else "",
        _counted(inspection.node_count, "node"),
    ]
    return f"{inspection.name}\n  {'; '.join(fact for fact in facts if fact)}"


def _weights(weights: Sequence[Weight], most: int) -> str:
    trained = [weight for weight in weights if weight.trains]
    shown = sorted(trained, key=lambda weight: -weight.bytes)[:most]
    rows = [(w.shown, w.type, _shape(w.shape), f"{w.count:,}", _bytes(w.bytes)) for w in shown]
    lines = aligned(rows, right=(3, 4), head=("name", "type", "shape", "parameters", "size"))
    if len(trained) > len(shown):
        rest = sum(weight.bytes for weight in trained) - sum(weight.bytes for weight in shown)
        lines.append(f"... and {len(trained) - len(shown)} smaller ones ({_bytes(rest)})")
    total = f"{sum(w.count for w in trained):,} parameters, {_bytes(sum(w.bytes for w in trained))}"
    return section(f"Trainable weights: {len(trained)} ({total})", lines or ["none"])


def _frozen(inspection: Inspection) -> str:
    by_reason: dict[str, list[Weight]] = {}
    for weight in inspection.weights:
        if not weight.trains:
            by_reason.setdefault(weight.frozen_because, []).append(weight)
    rows = [
        (
            str(len(group)),
            reason,
            f"{sum(weight.count for weight in group):,}",
            _bytes(sum(weight.bytes for weight in group)),
            shortened([weight.shown for weight in group], _NAMES_SHOWN),
        )
        for reason, group in sorted(by_reason.items(), key=lambda item: -sum(weight.count for weight in item[1]))
    ]
    count = sum(len(group) for group in by_reason.values())
    head = ("", "why", "parameters", "size", "names")
    hint = ["training.weights_to_train overrides this by exact name"] if count else []
    return section(f"Tensors that are not trainable: {count}", [*aligned(rows, right=(0, 2, 3), head=head), *hint])


def _operators(inspection: Inspection) -> str:
    names = [
        f"{operator.op_type if not operator.domain else f'{operator.domain}.{operator.op_type}'} {operator.count}"
        for operator in inspection.operators
    ]
    lines = textwrap.wrap(", ".join(name.replace(" ", "\0") for name in names), _WIDTH - 2)
    title = f"Operators: {_counted(len(names), 'kind')}, {_counted(inspection.node_count, 'node')}"
    return section(title, [line.replace("\0", " ") for line in lines])


def _obstacles(inspection: Inspection) -> str:
    rows = [
        (
            f"{operator.domain or 'ai.onnx'}.{operator.op_type}",
            operator.obstacle,
            shortened(operator.nodes, _NAMES_SHOWN),
        )
        for operator in inspection.obstacles
    ]
    return section("Cannot be lowered, so the model cannot be trained as it is", aligned(rows))


def _fusions(fusions: Sequence[Fusion]) -> str:
    """How often each fusion happens, in how many forms; the exported model has none of them."""
    groups: dict[tuple[str, str], list[Fusion]] = {}
    for fusion in fusions:
        groups.setdefault((fusion.kind, fusion.about), []).append(fusion)
    rows = [
        (kind, str(len(group)), about, f"{sum(fusion.replaced for fusion in group)} nodes")
        for (kind, about), group in groups.items()
    ]
    title = f"Fusions in training: {len(fusions)} (speed.fuse: false or speed.fusions_off leaves them out)"
    return section(title, aligned(rows, right=(1, 3)))


def _joined(groups: Sequence[Sequence[str]]) -> str:
    """How often layers that read the same are computed together, by their number."""
    by_size: dict[int, list[Sequence[str]]] = {}
    for group in groups:
        by_size.setdefault(len(group), []).append(group)
    rows = [
        (str(len(found)), f"groups of {size}", f"such as {shortened(found[0], _NAMES_SHOWN)}")
        for size, found in by_size.items()
    ]
    title = "Linear layers with the same input, computed together in training unless speed.join_layers is false"
    return section(title, aligned(rows, right=(0,)))


def _adapted(inspection: Inspection) -> str:
    """What adapters would be next to, by patterns that `adapter.targets` takes, and how much they would train."""
    patterns = Counter[tuple[str, tuple[int, int]]]()
    for name, matrix in inspection.adapted.items():
        patterns[re.sub(r"\d+(?=[._/])", "*", inspection.known_as.paths.get(name, name)), matrix] += 1
    rows = [
        (str(count), pattern, f"{outputs:,} outputs, {inputs:,} inputs")
        for (pattern, (outputs, inputs)), count in patterns.items()
    ]
    parameters = _SHOWN_RANK * sum(map(sum, inspection.adapted.values()))
    title = (
        f"Weights adapted if adapter.rank is set: {len(inspection.adapted)}; at rank {_SHOWN_RANK}, {parameters:,} "
        "parameters train. adapter.targets takes these patterns or others"
    )
    return section(title, aligned(rows, right=(0,)))


def _cuts(points: Sequence[CutPoint], most: int) -> str:
    if not points:
        return "Cut points: none; no single activation separates two trained parts of the network"
    shown = points if len(points) <= most else [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]
    rows = [
        (p.value, _shape(p.shape), f"{p.nodes_before:,}", f"{p.nodes_after:,}", f"{p.weights_before:,}") for p in shown
    ]
    head = ("value", "shape", "nodes before", "after", "weights before")
    lines = aligned(rows, right=(2, 3, 4), head=head)
    if len(shown) < len(points):
        lines.append(f"... {len(shown)} of {len(points)} shown, evenly spread")
    return section(f"Cut points: {len(points)}, where one activation separates two parts", lines)


def _bullet(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH - 2, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)


def _shape(shape: Shape) -> str:
    return "of unknown rank" if shape is None else f"[{', '.join(str(size) for size in shape)}]"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
