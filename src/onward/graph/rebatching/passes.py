"""A graph whose batch size was fixed at export, computing any number of samples: for training only, in place.

Shapes that the exporter stored as constants are rewritten where the batch is one of their factors. Whether samples stay
apart is then proven by numbers (`onward.lowering.rebatching_proof`).
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onward.graph.nodes.structure import label
from onward.graph.rebatching.following import BATCH, BatchFollower, NotRebatched
from onward.graph.rebatching.rules import REWRITES


@dataclass(frozen=True)
class Rebatching:
    """What was done.

    Attributes:
        size: the number of samples that the export had fixed.
        inputs: inputs whose first axis is any number of samples now.
        changes: operators whose constants were rewritten, with how many.
    """

    size: int
    inputs: tuple[str, ...]
    changes: dict[str, int]


def fixed_batch_size(graph: ir.Graph) -> int | None:
    """The first axis of a graph's first input of two or more axes, where the export fixed it; else None."""
    for value in graph.inputs:
        if value.shape is not None and len(value.shape) >= 2 and not value.is_initializer():
            size = value.shape[0]
            return size if isinstance(size, int) else None
    return None


def rebatch_graph(model: ir.Model) -> Rebatching:
    """Lets a prepared model compute any number of samples, in place.

    Raises:
        NotRebatched: it cannot, with the reason; the model is then half changed and of no use.
    """
    size = fixed_batch_size(model.graph)
    if size is None:
        raise NotRebatched("its batch size is not fixed")
    walk = BatchFollower(model, size)
    inputs = walk.start()
    for node in list(model.graph):
        _visit(walk, node)
    _check_outputs(walk)
    _write_shapes(walk)
    return Rebatching(size, inputs, dict(walk.changes))


def _check_outputs(walk: BatchFollower) -> None:
    """Samples are where the file has them."""
    if not any(walk.batch_axis(value) is not None for value in walk.graph.outputs):
        raise NotRebatched("none of its outputs depends on the batch")
    for value in walk.graph.outputs:
        axis, dims, declared = walk.batch_axis(value), walk.dims(value), value.shape
        if axis is None or dims is None or declared is None or len(declared) != len(dims):
            continue
        if declared[axis] != (dims[axis] or 0) // BATCH * walk.size or (declared[0] == walk.size and axis != 0):
            raise NotRebatched(f"its output {value.name!r} has the batch in axis {axis}, merged with other axes")


def _visit(walk: BatchFollower, node: ir.Node) -> None:
    if any(attribute.type is ir.AttributeType.GRAPH for attribute in node.attributes.values()):
        raise NotRebatched(f"{label(node)} contains subgraphs")
    rewrite = REWRITES.get(node.op_type)
    if node.domain == "" and rewrite is not None:
        rewrite(walk, node)
    if node.graph is None:
        return  # another node took its place
    walk.infer(node)
    walk.follow_numbers(node)
    walk.follow_outside(node)
    batched = any(walk.batch_axis(value) is not None for value in node.inputs)
    if batched and node.op_type not in ("Shape", "Size") and walk.loses_batch(node):
        raise NotRebatched(f"{label(node)} mixes the samples of a batch, or picks one of them")


def _write_shapes(walk: BatchFollower) -> None:
    """Shapes of all values with the batch as a symbol, and their types, without which a file holds no shape."""
    for value in (*walk.graph.inputs, *(output for node in walk.graph for output in node.outputs)):
        dims = walk.dims(value)
        if value.is_initializer() or (dims is None and value.shape is None):
            continue
        old = None if value.shape is None or dims is None or len(value.shape) != len(dims) else value.shape
        if dims is None:
            value.shape = None
            continue
        dtype = walk.dtype(value)
        if value.type is None and dtype is not None:
            value.type = ir.TensorType(dtype)
        value.shape = ir.Shape([_symbol(size, None if old is None else old[place]) for place, size in enumerate(dims)])


def _symbol(size: int | None, old: int | ir.SymbolicDim | None) -> int | ir.SymbolicDim | None:
    if size is None:
        return old if isinstance(old, ir.SymbolicDim) else None
    if size == BATCH:
        return ir.SymbolicDim("batch")
    return None if size and size % BATCH == 0 else size


__all__ = ["NotRebatched", "Rebatching", "fixed_batch_size", "rebatch_graph"]
