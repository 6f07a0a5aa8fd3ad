"""Parameters that are left only as their repetitions, one for each sample of a batch of fixed size."""

from __future__ import annotations

import re
from collections.abc import Container

import numpy as np
import onnx_ir as ir

from onward.graph.nodes.node_writer import NodeWriter
from onward.graph.nodes.rearrangement import Rearrangement
from onward.graph.weights.evidence import folded_parameters
from onward.graph.weights.gradients import TRAINABLE_TYPES


def tie_repeated_rows(model: ir.Model) -> tuple[dict[str, Rearrangement], dict[str, str]]:
    """Makes the first row of an initializer a weight that an `Expand` node repeats, in place.

    Looks at what is left of a parameter that the module expanded for each sample, such as the class token of a vision
    transformer, where the batch had a fixed size at export: torch's exporter names it after the call, `expand`, and
    notes the parameter. Its rows are equal and as many as an input has, and nothing repeats along another axis.
    """
    graph = model.graph
    rows: dict[str, Rearrangement] = {}
    notes = {}
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
        output = ir.Value(name=f"{copy.name}_tied", shape=copy.shape, type=copy.type)
        node = ir.Node("", "Expand", [weight, sizes], outputs=[output], name=f"tie_{copy.name}")
        graph.insert_before(next(iter(graph)), node)
        copy.replace_all_uses_with(output, replace_graph_outputs=True)
        graph.initializers.pop(str(copy.name))
        graph.register_initializer(weight)
        rows[str(copy.name)] = Rearrangement(tuple(range(len(shape))), shape)
        notes[str(copy.name)] = (
            f"{copy.name!r} is {parameters[0]!r} repeated for each of {shape[0]} samples, computed by the exporter for "
            "a batch of fixed size; it trains as one row, and is written for as many samples again."
        )
    return rows, notes


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
