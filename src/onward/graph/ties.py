"""Weights that an exporter split: transposed copies of one weight, tied again.

Exporters fold `Transpose(embedding)` into a second tensor, which would then be a weight of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onward.graph import provenance
from onward.graph.gradients import TRAINABLE_TYPES


@dataclass(frozen=True)
class Tie:
    """An initializer that repeats a weight: `copy = weight.transpose(permutation)`."""

    weight: str
    permutation: tuple[int, ...]


def tie_transposed_copies(model: ir.Model) -> tuple[dict[str, Tie], tuple[str, ...]]:
    """Replaces an initializer that is the transpose of another by a `Transpose` node, in place.

    Looks at 2-D float initializers of more than one row and column that are equal element by element.
    Returns the ties by the copy's name, and a sentence for each.
    """
    graph = model.graph
    by_shape: dict[tuple[int, int], list[ir.Value]] = {}
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype in TRAINABLE_TYPES and len(tensor.shape) == 2 and value.uses():
            rows, columns = (int(size) for size in tensor.shape.numpy())
            if min(rows, columns) > 1:
                by_shape.setdefault((rows, columns), []).append(value)
    ties: dict[str, Tie] = {}
    notes = []
    for (rows, columns), originals in by_shape.items():
        for copy in by_shape.get((columns, rows), []):
            original = next((o for o in originals if _comes_from(copy, o) and _is_transpose(copy, o)), None)
            if original is None or original is copy or original.name in ties or copy.name in ties:
                continue
            ties[str(copy.name)] = Tie(str(original.name), (1, 0))
            notes.append(
                f"{copy.name!r} is the transpose of {original.name!r}, folded by the exporter; they are tied again "
                "and train as one weight."
            )
            _replace_by_transpose(graph, copy, original)
    return ties, tuple(notes)


def _comes_from(copy: ir.Value, original: ir.Value) -> bool:
    """The copy carries no claim of being a parameter of its own, or names the original as its origin."""
    sources = provenance.folded_sources(copy)
    if sources:
        return original.name in sources
    if provenance.KIND in copy.metadata_props:
        return False
    return _feeds(original, "Gather") or _folded_by_older_exporter(copy, original)


def _folded_by_older_exporter(copy: ir.Value, original: ir.Value) -> bool:
    """torch's older exporter makes up a name for the transpose and keeps the parameter, with its own, where it is used
    as it is, too."""
    if not str(copy.name).startswith("onnx::") or provenance.is_automatic_name(str(original.name)):
        return False
    assert original.const_value is not None
    array = original.const_value.numpy()
    return array.shape[0] != array.shape[1] or not np.array_equal(array, array.T)


def _feeds(value: ir.Value, op_type: str) -> bool:
    return any(use.node.op_type == op_type for use in value.uses())


def _is_transpose(copy: ir.Value, original: ir.Value) -> bool:
    left, right = copy.const_value, original.const_value
    assert left is not None
    assert right is not None
    if left.dtype != right.dtype:
        return False
    a, b = left.numpy(), right.numpy().T
    # The first row decides nearly always, without reading the rest.
    return bool(np.array_equal(a[0], b[0]) and np.array_equal(a, b) and (a != a.flat[0]).any())


def _replace_by_transpose(graph: ir.Graph, copy: ir.Value, original: ir.Value) -> None:
    output = ir.Value(name=f"{copy.name}_tied", shape=copy.shape, type=copy.type)
    node = ir.Node(
        "", "Transpose", [original], [ir.AttrInt64s("perm", [1, 0])], outputs=[output], name=f"tie_{copy.name}"
    )
    first = next(iter(graph))
    graph.insert_before(first, node)
    copy.replace_all_uses_with(output, replace_graph_outputs=True)
    graph.initializers.pop(str(copy.name))
