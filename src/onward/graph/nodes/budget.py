"""What a model asks of the machine, found without doing it: nodes after functions are expanded, nesting, bytes, numbers
that follow from constants. More than the limits of a run is refused before it takes memory or time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping

import onnx
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.nodes.iteration import every_node
from onward.parameters.limits import Limits

_LENGTH_OF_INPUT = frozenset(
    {
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Cast",
        "CastLike",
        "Identity",
        "Slice",
        "Squeeze",
        "Unsqueeze",
        "Reshape",
        "Neg",
        "Abs",
    }
)
"""Operators whose result has as many numbers as the longest input, or fewer."""


class PreparationDeadline:
    """The time that a model's preparation may take, from its reading on."""

    def __init__(self, limits: Limits) -> None:
        self._seconds = limits.preparation_seconds
        self._begin = time.monotonic()

    def check(self, what: str) -> None:
        """Ends a preparation that takes too long.

        Raises:
            ModelError: the time is over, after `what` was done.
        """
        passed = time.monotonic() - self._begin
        if passed > self._seconds:
            raise _refused(
                f"preparing the model took {passed:,.0f} s up to {what}", self._seconds, "preparation_seconds"
            )


def _refused(what: str, limit: float, name: str) -> ModelError:
    return ModelError(
        f"{what}; at most {limit:,.10g} are allowed. If the model is as intended, set limits.{name} higher in "
        f"RUN.yaml, or pass --limits.{name} to a command, or limits=Limits({name}=...) in Python."
    )


def check_message(proto: onnx.ModelProto, where: str, limits: Limits) -> None:
    """Nesting, nodes and axes of a message, before anything that calls itself walks through it.

    Raises:
        ModelError: with what was exceeded, and the field that raises it.
    """
    functions = {(one.domain, one.name): one for one in proto.functions}
    counts: dict[tuple[str, str], int] = {}
    graphs = [proto.graph, *(info.algorithm for info in proto.training_info)]
    for graph in (*graphs, *(info.initialization for info in proto.training_info)):
        _check_axes(graph, where, limits)
        total = _expanded_nodes(graph.node, functions, counts, (), where, limits)
        if total > limits.nodes:
            raise _refused(f"{where} has {total:,} nodes, functions expanded at every call", limits.nodes, "nodes")


def _expanded_nodes(
    nodes: Iterable[onnx.NodeProto],
    functions: Mapping[tuple[str, str], onnx.FunctionProto],
    counts: dict[tuple[str, str], int],
    inside: tuple[tuple[str, str], ...],
    where: str,
    limits: Limits,
) -> int:
    """Nodes, with those of nested graphs and of what is called; each function is counted once and multiplied."""
    left, total = [(node, 1) for node in nodes], 0
    while left:
        node, depth = left.pop()
        if depth > limits.nesting:
            raise _refused(f"{where} nests graphs more than {limits.nesting} deep", limits.nesting, "nesting")
        called = (node.domain, node.op_type)
        if called in functions and called not in counts:
            if called in inside:
                raise ModelError(f"{where}: the function {'::'.join(called)} calls itself, which ONNX does not allow.")
            if len(inside) >= limits.nesting:
                reason = f"{where} has functions that call each other more than {limits.nesting} deep"
                raise _refused(reason, limits.nesting, "nesting")
            body = functions[called].node
            counts[called] = _expanded_nodes(body, functions, counts, (*inside, called), where, limits)
        total += max(1, counts.get(called, 1))
        for attribute in node.attribute:
            graphs = [attribute.g, *attribute.graphs] if attribute.HasField("g") else attribute.graphs
            left.extend((inner, depth + 1) for graph in graphs for inner in graph.node)
    return total


def _check_axes(graph: onnx.GraphProto, where: str, limits: Limits) -> None:
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in (*graph.input, *graph.output)}
    ranks |= {value.name: len(value.type.tensor_type.shape.dim) for value in graph.value_info}
    ranks |= {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    for name, rank in ranks.items():
        if rank > limits.tensor_axes:
            raise _refused(f"{where}: {name!r} has {rank:,} axes", limits.tensor_axes, "tensor_axes")


def check_stored(tensors: Iterable[ir.TensorProtocol], where: str, limits: Limits) -> None:
    """The bytes of a model's tensors together.

    Raises:
        ModelError: they are more than `limits.model_gb`.
    """
    total = sum(tensor.nbytes for tensor in tensors)
    if total > limits.model_gb * 1e9:
        raise _refused(f"{where} stores {total / 1e9:,.1f} GB of tensors", limits.model_gb, "model_gb")


def check_shape_numbers(graph: ir.Graph, limits: Limits) -> None:
    """How many numbers shape arithmetic may compute, for every value.

    Raises:
        ModelError: one value would have more than `limits.shape_numbers`.
    """
    label, count = largest_value(graph)
    if count > limits.shape_numbers:
        raise _refused(
            f"{label} computes {count:,} numbers from constants before the model runs", limits.shape_numbers,
            "shape_numbers",
        )  # fmt: skip


def check_constants(graph: ir.Graph, limits: Limits) -> None:
    """The bytes of tensors whose sizes stored numbers give: ranges, fills, repetitions.

    Raises:
        ModelError: one of them would be larger than `limits.constant_gb`.
    """
    for node in every_node(graph):
        count = _elements(node) if node.domain == "" and node.op_type in _SIZED_BY_NUMBERS else 0
        if count * _ASSUMED_BYTES > limits.constant_gb * 1e9:
            label = f"node {node.name or node.outputs[0].name!r} ({node.op_type})"
            reason = f"{label} computes a tensor of {count:,} elements from stored numbers"
            raise _refused(f"{reason}, {count * _ASSUMED_BYTES / 1e9:,.1f} GB", limits.constant_gb, "constant_gb")


_SIZED_BY_NUMBERS = frozenset({"Range", "ConstantOfShape", "Expand", "Tile"})
_ASSUMED_BYTES = 4
"""Of an element: most are float32."""


def _elements(node: ir.Node) -> int:
    """How many elements a node gives at least, by its stored inputs; 0: they are not stored."""
    places = (0, 1, 2) if node.op_type == "Range" else (0,) if node.op_type == "ConstantOfShape" else (1,)
    inputs = [node.inputs[at] if at < len(node.inputs) else None for at in places]
    tensors = [None if value is None else value.const_value for value in inputs]
    if any(one is None or one.size > 64 or one.dtype is ir.DataType.STRING for one in tensors):
        return 0
    numbers = [[float(number) for number in one.numpy().reshape(-1)] for one in tensors if one is not None]
    if node.op_type != "Range":
        return int(min(math.prod(max(0.0, size) for size in numbers[0]), 1e30))
    if any(len(one) != 1 for one in numbers) or numbers[2][0] == 0 or not all(math.isfinite(one[0]) for one in numbers):
        return 0
    return int(max(0.0, (numbers[1][0] - numbers[0][0]) / numbers[2][0]))


def largest_value(graph: ir.Graph) -> tuple[str, int]:
    """The node whose result, as far as it follows from constants, may have the most numbers, and how many."""
    lengths: dict[ir.Value, int] = {}
    largest = ("no node", 0)
    for node in every_node(graph):
        if node.domain != "":
            continue
        inputs = [_length(value, lengths) for value in node.inputs if value is not None]
        if node.op_type in ("Shape", "Size"):
            count = 64
        elif not inputs or (node.op_type in _LENGTH_OF_INPUT | {"Concat"} and any(one == 0 for one in inputs)):
            continue
        elif node.op_type == "Concat":
            count = sum(inputs)
        elif node.op_type in _LENGTH_OF_INPUT:
            count = max(inputs)
        elif node.op_type == "Gather":
            count = max(1, inputs[-1])
        else:
            continue
        lengths.update(dict.fromkeys(node.outputs, count))
        if node.op_type == "Concat" and count > largest[1]:
            largest = (f"node {node.name or node.outputs[0].name!r} (Concat)", count)
    return largest


def _length(value: ir.Value, lengths: Mapping[ir.Value, int]) -> int:
    """How many whole numbers of a constant, or of what follows from constants; 0: neither."""
    tensor = value.const_value
    if tensor is None:
        return lengths.get(value, 0)
    return tensor.size if tensor.dtype in (ir.DataType.INT64, ir.DataType.INT32) and len(tensor.shape) < 2 else 0
