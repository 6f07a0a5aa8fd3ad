"""Tensors that a file stores as places and numbers: read as the dense tensors that they stand for.

The standard gives every operator the dense tensor; onnx-ir has no place for the sparse form, nor has torch's autograd
gradients for it that every operator takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx
from onnx import numpy_helper

from onward.errors import ModelError
from onward.graph.nodes.structure import check_text

LARGEST_BYTES = 2**31 - 1
"""Protobuf's limit: a tensor of more bytes cannot be inside of a file."""

SPARSE = "onward.sparse"
"""Key in `ir.Model.meta`: name of a tensor that was stored sparse -> (elements that were stored, all elements)."""

Stored = Mapping[str, tuple[int, int]]
"""As under `SPARSE`."""


def with_dense_tensors(proto: onnx.ModelProto, where: str) -> tuple[onnx.ModelProto, Stored]:
    """The model with a dense tensor instead of every sparse initializer and every `Constant`'s `sparse_value`.

    https://onnx.ai/onnx/repo-docs/IR.html (SparseTensorProto). A model without any is returned itself, another as a
    copy, with the names and counts of what was sparse.

    Raises:
        ModelError: indices do not fit the numbers or the shape, or the dense tensor would be too large.
    """
    graphs = list(_graphs(proto))
    if not any(graph.sparse_initializer for graph in graphs) and not any(_constants(_nodes(proto))):
        return proto, {}
    dense = onnx.ModelProto()
    dense.CopyFrom(proto)
    stored: dict[str, tuple[int, int]] = {}
    for graph in _graphs(dense):
        for sparse in graph.sparse_initializer:
            name = sparse.values.name
            graph.initializer.append(_dense(sparse, name, f"{where}: the sparse initializer {name!r}"))
            stored[name] = (sparse.values.dims[0], math.prod(sparse.dims))
        del graph.sparse_initializer[:]
    for node, attribute in _constants(_nodes(dense)):
        name = node.output[0] if node.output else ""
        sparse = attribute.sparse_tensor
        tensor = _dense(sparse, name, f"{where}: the sparse_value of the Constant {name!r}")
        stored[name] = (sparse.values.dims[0], math.prod(sparse.dims))
        attribute.CopyFrom(onnx.helper.make_attribute("value", tensor))
    return dense, stored


def notes_on_sparse_tensors(stored: Stored, weights: Iterable[str]) -> tuple[str, ...]:
    """What becomes of each weight that was stored sparse, one sentence each, for the user."""
    trained = set(weights)
    return tuple(
        f"the weight {name!r} was stored sparse, {some:,} of its {total:,} elements; all of them train, and export "
        "writes it as a dense tensor."
        for name, (some, total) in stored.items()
        if name in trained
    )


def _graphs(proto: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """The main graph and every graph in a node's attribute, functions' nodes included."""
    yield proto.graph
    for node in _nodes(proto):
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield attribute.g
            yield from attribute.graphs


def _nodes(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    left = [*proto.graph.node, *(node for function in proto.functions for node in function.node)]
    while left:
        node = left.pop()
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                left.extend(attribute.g.node)
            left.extend(node for graph in attribute.graphs for node in graph.node)


def _constants(nodes: Iterable[onnx.NodeProto]) -> Iterator[tuple[onnx.NodeProto, onnx.AttributeProto]]:
    for node in nodes:
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            for attribute in node.attribute:
                if attribute.name == "sparse_value" and attribute.HasField("sparse_tensor"):
                    yield node, attribute


def _dense(sparse: onnx.SparseTensorProto, name: str, what: str) -> onnx.TensorProto:
    check_text([name], what)
    for part in (sparse.values, sparse.indices):
        if part.data_location == onnx.TensorProto.EXTERNAL:
            raise ModelError(f"{what} has its data in another file; only dense tensors may. Store it as a dense one.")
    dims = tuple(sparse.dims)
    if any(size < 0 for size in dims):
        raise ModelError(f"{what} has the shape {list(dims)}, with a negative size.")
    try:
        values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{what} cannot be read: {error}") from error
    if values.dtype == object or indices.dtype != np.int64 or values.ndim != 1:
        raise ModelError(
            f"{what} holds {values.dtype} values of shape {list(values.shape)} at {indices.dtype} indices; expected "
            "a list of numbers at int64 indices."
        )
    if math.prod(dims) * values.itemsize > LARGEST_BYTES:
        raise ModelError(
            f"{what} has the shape {list(dims)}, {math.prod(dims) * values.itemsize:,} bytes as the dense tensor that "
            f"it stands for; at most {LARGEST_BYTES:,} are possible."
        )
    dense = np.zeros(math.prod(dims), values.dtype)
    dense[_places(indices, len(values), dims, what)] = values
    return numpy_helper.from_array(dense.reshape(dims), name)


def _places(indices: np.ndarray, count: int, dims: Sequence[int], what: str) -> np.ndarray:
    """Where each value is in the flat dense tensor: indices are (count,), or (count, rank), in ascending order."""
    linear = indices.shape == (count,)
    if not linear and indices.shape != (count, len(dims)):
        raise ModelError(
            f"{what} has indices of shape {list(indices.shape)} for {count} values and the shape {list(dims)}; "
            f"expected [{count}] or [{count}, {len(dims)}]."
        )
    limits = np.array([math.prod(dims)] if linear else dims, np.int64)
    outside = np.argwhere(((indices < 0) | (indices >= limits)).reshape(count, -1).any(1)).reshape(-1)
    if outside.size:
        raise ModelError(
            f"{what} has index {int(outside[0])} at {indices[outside[0]].tolist()}, outside of the shape {list(dims)}."
        )
    if not linear:
        strides = [math.prod(dims[axis + 1 :]) for axis in range(len(dims))]
        indices = indices @ np.array(strides, np.int64)
    if np.any(np.diff(indices) <= 0):
        first = int(np.argmax(np.diff(indices) <= 0)) + 1
        raise ModelError(f"{what} has its indices out of order at index {first}; the standard has them ascend.")
    return indices
