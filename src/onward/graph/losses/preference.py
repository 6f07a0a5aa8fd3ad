"""What losses of preferences need of the model: inputs that hold pairs, and a frozen copy as the reference.

The copy computes what the model computes when the run starts. It shares the weights that do not train; of those that
train it has copies, which stay as they are in the file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.nodes.node_writer import NodeWriter
from onward.losses.classes import describe_shape

PAIRS = "pairs"
"""The first size of every input: how many pairs a batch has."""

_COPY_OF = "onward.copy_of"


def merge_pairs(writer: NodeWriter) -> None:
    """Gives every input of the model an axis of 2 behind the batch; the model computes both halves as samples.

    Raises:
        ModelError: an input has no batch axis of any size.
    """
    graph, before = writer.graph, len(writer.graph)
    first = next(iter(graph))
    for place, value in enumerate(list(graph.inputs)):
        if value.is_initializer():
            continue
        if not value.shape or isinstance(value.shape[0], int):
            raise ModelError(
                f"loss.type 'dpo' computes two samples for each pair, but input {value.name!r} is "
                f"{describe_shape(value)}; expected a batch of any size first. Export the model with a symbolic batch, "
                "or set data.fixed_inputs for an input that is the same for every sample."
            )
        name, rest = str(value.name), list(value.shape)[1:]
        value.name = writer.unique(f"{writer.prefix}{name}_of_pairs")
        pairs = ir.Value(name=name, type=value.type, shape=ir.Shape([ir.SymbolicDim(PAIRS), 2, *rest]))
        graph.inputs[place] = pairs
        merged = writer.reshape(pairs, _merged_sizes(writer, pairs, rest), name=f"merged_{name}")
        merged.type, merged.shape = value.type, value.shape
        value.replace_all_uses_with(merged)
    written = list(graph)[before:]
    graph.remove(written)
    graph.insert_before(first, written)


def _merged_sizes(writer: NodeWriter, pairs: ir.Value, rest: list[int | ir.SymbolicDim]) -> ir.Value:
    known = [size for size in rest if isinstance(size, int)]
    if len(known) == len(rest):
        return writer.constant([-1, *known], "merged_sizes")
    kept = writer.apply(
        "Gather", writer.apply("Shape", pairs), writer.constant(range(2, 2 + len(rest)), "axes"), axis=0
    )
    return writer.apply("Concat", writer.constant([-1], "all_samples"), kept, axis=0, name="merged_sizes")


def frozen_copy(writer: NodeWriter, value: ir.Value) -> ir.Value:
    """The same value computed by copies of all nodes that it depends on, with copies of their weights.

    Dropout is left out. `share_frozen` ties the copies of weights that turn out not to train.

    Raises:
        ModelError: a node has a nested graph, or updates running statistics.
    """
    copies: dict[ir.Value, ir.Value] = {}
    for node in _ancestors(writer.graph, value):
        _check_copyable(node)
        given = [None if one is None else _copied(writer, one, copies) for one in node.inputs]
        if node.op_type == "Dropout":
            copies[node.outputs[0]] = given[0]  # type: ignore[assignment]
            continue
        outputs = [
            ir.Value(name=writer.unique(f"{writer.prefix}reference/{one.name}"), type=one.type, shape=one.shape)
            for one in node.outputs
        ]
        copies |= dict(zip(node.outputs, outputs, strict=True))
        writer.graph.append(
            ir.Node(
                node.domain,
                node.op_type,
                given,
                list(node.attributes.values()),
                overload=node.overload,
                outputs=outputs,
                name=writer.unique_node_name(f"{writer.prefix}reference/{node.name}"),
            )
        )
    return copies[value]


def _ancestors(graph: ir.Graph, value: ir.Value) -> list[ir.Node]:
    """The nodes that a value depends on, in the order of the graph."""
    needed, waiting = set[ir.Node](), [value.producer()]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in needed:
            needed.add(node)
            waiting += [one.producer() for one in node.inputs if one is not None]
    return [node for node in graph if node in needed]


def _check_copyable(node: ir.Node) -> None:
    has_graph = any(one.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for one in node.attributes.values())
    if has_graph or node.op_type == "BatchNormalization":
        what = "a nested graph" if has_graph else "running statistics"
        raise ModelError(
            f"loss.type 'dpo' computes the reference by a frozen copy of the model, but {node.op_type} "
            f"{node.name!r} has {what}. Compute the reference's log-probabilities beforehand and set "
            "loss.reference_log_probabilities."
        )


def _copied(writer: NodeWriter, value: ir.Value, copies: dict[ir.Value, ir.Value]) -> ir.Value:
    """What the copy reads instead of a value: a copied result, a copied weight, or an input of the graph itself."""
    if value not in copies and value.is_initializer():
        name = writer.unique(f"{writer.prefix}reference/{value.name}")
        copy = ir.Value(name=name, type=value.type, shape=value.shape, const_value=value.const_value)
        copy.meta[_COPY_OF] = value.name
        writer.graph.register_initializer(copy)
        writer.constants.append(name)
        copies[value] = copy
    return copies.get(value, value)


def share_frozen(graph: ir.Graph, trained: Collection[str], frozen: Mapping[str, str]) -> dict[str, str]:
    """Ties copies of weights that do not train to the weights themselves; what is frozen then, with the reasons."""
    gone = set()
    for name, copy in list(graph.initializers.items()):
        original = copy.meta.get(_COPY_OF)
        if original is not None and original not in trained and original in graph.initializers:
            copy.replace_all_uses_with(graph.initializers[original])
            graph.initializers.pop(name)
            gone.add(name)
    return {name: reason for name, reason in frozen.items() if name not in gone}
