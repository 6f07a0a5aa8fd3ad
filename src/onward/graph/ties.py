"""Weights that an exporter split: copies of one weight, transposed or repeated for every sample, tied again.

Exporters fold `Transpose(embedding)` into a second tensor, and the first step of a recurrent net that starts from zeros
into its bias, once for each sample; either would then be a weight of its own.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onward.graph import provenance
from onward.graph.gradients import TRAINABLE_TYPES
from onward.graph.node_writer import NodeWriter
from onward.graph.weight_evidence import folded_parameters


@dataclass(frozen=True)
class Tie:
    """An initializer that repeats a weight: `weight.transpose(permutation)`, broadcast to `shape` if given.

    One that repeats its own first row has the weight's name: what trains is the row.
    """

    weight: str
    permutation: tuple[int, ...]
    shape: tuple[int, ...] | None = None

    @property
    def relation(self) -> str:
        """What the copy is to the weight, in a word."""
        return "transposed" if self.shape is None else "repeated"


def tie_copies(model: ir.Model) -> tuple[dict[str, Tie], tuple[str, ...]]:
    """Replaces initializers that are copies of others by nodes that compute them, in place.

    Returns the ties by the copy's name, and a sentence for each.
    """
    transposed, first = tie_transposed_copies(model)
    repeated, second = tie_repeated_biases(model)
    rows, third = tie_repeated_rows(model)
    return {**transposed, **repeated, **rows}, (*first, *second, *third)


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
            _replace(graph, copy, "Transpose", [original], [ir.AttrInt64s("perm", [1, 0])])
    return ties, tuple(notes)


def tie_repeated_biases(model: ir.Model) -> tuple[dict[str, Tie], tuple[str, ...]]:
    """Replaces an initializer that repeats another along some axes by an `Expand` node, in place.

    Looks at floats that the exporter noted to be computed from the other, and that are equal to it element by element:
    `W 0 + b`, the first step of a recurrent net whose initial state is zeros for a fixed number of samples.
    """
    graph = model.graph
    ties: dict[str, Tie] = {}
    notes = []
    for copy in list(graph.initializers.values()):
        sources = [graph.initializers.get(name) for name in provenance.folded_sources(copy)]
        original = next((one for one in sources if one is not None and _is_repetition(copy, one)), None)
        if original is None:
            continue
        assert copy.const_value is not None
        assert original.const_value is not None
        shape = tuple(int(size) for size in copy.const_value.shape.numpy())
        ties[str(copy.name)] = Tie(str(original.name), tuple(range(len(original.const_value.shape))), shape)
        notes.append(
            f"{copy.name!r} is {original.name!r} repeated to the shape {list(shape)}, computed by the exporter for a "
            "batch of fixed size (as it does with the first step of a recurrent net that starts from zeros); they are "
            "tied again and train as one weight."
        )
        sizes = NodeWriter(model, "").constant(shape, f"{copy.name}_shape")
        _replace(graph, copy, "Expand", [original, sizes], [])
    return ties, tuple(notes)


def tie_repeated_rows(model: ir.Model) -> tuple[dict[str, Tie], tuple[str, ...]]:
    """Makes the first row of an initializer a weight that an `Expand` node repeats, in place.

    Looks at what is left of a parameter that the module expanded for each sample, such as the class token of a vision
    transformer, where the batch had a fixed size at export: torch's exporter names it after the call, `expand`, and
    notes the parameter. Its rows are equal and as many as an input has, and nothing repeats along another axis.
    """
    graph = model.graph
    ties: dict[str, Tie] = {}
    notes = []
    batches = {value.shape[0] for value in graph.inputs if value.shape is not None and len(value.shape)}
    for copy in list(graph.initializers.values()):
        if _EXPANDED.fullmatch(str(copy.name)) is None or not _has_equal_rows(copy, batches):
            continue
        parameters = folded_parameters(copy)
        if len(parameters) != 1:
            continue
        stored = copy.const_value
        assert stored is not None
        shape = tuple(int(size) for size in stored.shape.numpy())
        row = ir.Tensor(np.array(stored.numpy()[:1]), dtype=stored.dtype, name=copy.name)
        weight = ir.Value(name=f"{copy.name}", shape=row.shape, type=copy.type, const_value=row)
        weight.metadata_props.update(copy.metadata_props)
        sizes = NodeWriter(model, "").constant(shape, f"{copy.name}_shape")
        _replace(graph, copy, "Expand", [weight, sizes], [])
        graph.register_initializer(weight)
        ties[str(copy.name)] = Tie(str(copy.name), tuple(range(len(shape))), shape)
        notes.append(
            f"{copy.name!r} is {parameters[0]!r} repeated for each of {shape[0]} samples, computed by the exporter for "
            "a batch of fixed size; it trains as one row, and is written for as many samples again."
        )
    return ties, tuple(notes)


_EXPANDED = re.compile(r"expand(_\d+)?")


def _has_equal_rows(value: ir.Value, sizes: Container[object]) -> bool:
    """Whether a float tensor of several rows, as many as one of `sizes`, repeats one row, and no other axis."""
    tensor = value.const_value
    if tensor is None or tensor.dtype not in TRAINABLE_TYPES or not value.uses():
        return False
    shape = tuple(int(size) for size in tensor.shape.numpy())
    if len(shape) < 2 or shape[0] < 2 or shape[0] not in sizes:
        return False
    array = tensor.numpy()
    repeats = [axis for axis, size in enumerate(shape) if size > 1 and bool((array == array.take([0], axis)).all())]
    return repeats == [0]


def _is_repetition(copy: ir.Value, original: ir.Value) -> bool:
    left, right = copy.const_value, original.const_value
    if left is None or right is None or left is right or left.dtype != right.dtype or left.dtype not in TRAINABLE_TYPES:
        return False
    shape, smaller = left.shape.numpy(), right.shape.numpy()
    axes = zip(reversed(shape), reversed(smaller), strict=False)
    if not copy.uses() or shape == smaller or len(smaller) > len(shape) or any(m not in (1, n) for n, m in axes):
        return False
    a, b = left.numpy(), right.numpy()
    # Equal numbers prove nothing of a tensor that holds one number only.
    return bool((b != b.flat[0]).any()) and bool((a == b).all())


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


def _replace(
    graph: ir.Graph, copy: ir.Value, op_type: str, inputs: Sequence[ir.Value], attributes: Sequence[ir.Attr]
) -> None:
    output = ir.Value(name=f"{copy.name}_tied", shape=copy.shape, type=copy.type)
    node = ir.Node("", op_type, inputs, attributes, outputs=[output], name=f"tie_{copy.name}")
    graph.insert_before(next(iter(graph)), node)
    copy.replace_all_uses_with(output, replace_graph_outputs=True)
    graph.initializers.pop(str(copy.name))
