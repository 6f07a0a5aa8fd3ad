"""Weights that layers multiply by and that are not trained: which stored tensors they are made of, and their scales.

A weight need not be stored as it is multiplied: between the two may be a cast, a transposition or a dequantization.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from onward.graph.operators import Fact, has_fact, operator

LARGEST_TABLE_ELEMENTS = 4096
"""A product with a constant of more elements is a layer; a smaller one is a table of frequencies or the like."""

_QUANTIZED_PRODUCTS = frozenset(
    {
        "DynamicQuantizeMatMul", "MatMulBnb4", "MatMulInteger", "MatMulIntegerToFloat", "MatMulNBits", "QGemm",
        "QLinearMatMul",
    }
)  # fmt: skip
"""Products that read a quantized weight themselves."""


@dataclass(frozen=True)
class FrozenTensors:
    """Stored tensors that make up the weights of layers and are not trained, by name.

    Attributes:
        weights: the large ones, tables that batches look up in included.
        scales: of the integers, or 4-bit floats, among them.
    """

    weights: frozenset[str]
    scales: frozenset[str]


def is_product(node: ir.Node) -> bool:
    """Whether a node multiplies matrices or convolves, in float or with a quantized weight."""
    return has_fact(node.op_type, Fact.MATMUL | Fact.CONVOLUTION) or node.op_type in _QUANTIZED_PRODUCTS


def find_frozen_weights(graph: ir.Graph, trained: Collection[str]) -> FrozenTensors:
    """The frozen weights of the main graph; `trained` names initializers that change, running statistics included."""
    sources = constant_sources(graph, trained)
    layers = frozen_layers(graph, sources)
    weights = {one for values in layers.values() for value in values for one in sources[value] if _is_large(one)}
    scales = set[ir.Value]()
    for node in graph:
        table = node.inputs[0] if node.op_type == "Gather" else None
        if table in sources and table.is_initializer() and _is_large(table) and node.inputs[1] not in sources:
            weights.add(table)
    for node in graph:
        if any(sources[value] & weights for value in node.inputs if value in sources):
            read = [value for index, value in enumerate(node.inputs) if operator(node.op_type).input(index) == "scale"]
            scales.update(value for value in read if value is not None and value.is_initializer())
    return FrozenTensors(_names(weights - scales), _names(scales & sources.keys()))


def frozen_layers(
    graph: ir.Graph, sources: Mapping[ir.Value, Collection[ir.Value]]
) -> dict[ir.Node, tuple[ir.Value, ...]]:
    """Products of an activation and large constants -> the constants, stored or computed (`constant_sources`)."""
    found = {}
    for node in graph:
        if is_product(node) and not all(value is None or value in sources for value in node.inputs):
            constants = [value for value in node.inputs if value is not None and value in sources]
            read = tuple(value for value in constants if any(map(_is_large, sources[value])))
            if read:
                found[node] = read
    return found


def constant_sources(graph: ir.Graph, trained: Collection[str]) -> dict[ir.Value, frozenset[ir.Value]]:
    """Values that follow from stored tensors alone -> these tensors; nothing that is trained, random or nested."""
    found = {
        value: frozenset({value})
        for name, value in graph.initializers.items()
        if name not in trained and value.const_value is not None and not value.is_graph_input()
    }
    for node in graph:
        read = [value for value in node.inputs if value is not None]
        if not read or has_fact(node.op_type, Fact.RANDOM | Fact.CONTROL_FLOW):
            continue
        if all(value in found for value in read):
            found |= dict.fromkeys(node.outputs, frozenset[ir.Value]().union(*(found[value] for value in read)))
    return found


def _is_large(value: ir.Value) -> bool:
    tensor = value.const_value
    return tensor is not None and tensor.size > LARGEST_TABLE_ELEMENTS


def _names(values: Collection[ir.Value]) -> frozenset[str]:
    return frozenset(str(value.name) for value in values)
