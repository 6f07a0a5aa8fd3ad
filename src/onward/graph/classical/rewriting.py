"""Replacing one node of ai.onnx.ml by simpler ones whose inputs are what the node stores in its attributes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onward.errors import ModelError
from onward.graph.nodes.node_writer import Attribute, NodeFactory
from onward.graph.nodes.provenance import KIND
from onward.graph.nodes.structure import ML_DOMAIN, label

DOMAIN = "onward.classical"
"""Domain of the operators that the standard has no simpler ones for: kernels, trees, lookups."""


@dataclass(frozen=True)
class AttributeWeight:
    """A trainable weight that the user's graph stores as an attribute, a list of floats.

    Attributes:
        output: the first output of the node, by which it is found.
        attribute: name of the attribute.
    """

    output: str
    attribute: str


@dataclass
class Rewritten:
    """What became of the attributes of the nodes that were rewritten.

    Attributes:
        weights: initializer -> the attribute that it was.
        constants: initializer that never trains -> why.
        notes: what the user may want to know, one sentence each.
    """

    weights: dict[str, AttributeWeight] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class NodeRewriter:
    """Writes what one node stands for in front of it, and takes the node out in the end.

    Attributes:
        node: the node.
        opset: version of the standard domain that the model imports.
        done: where the attributes that become initializers are entered.
    """

    def __init__(self, writer: NodeFactory, node: ir.Node, done: Rewritten) -> None:
        self.writer, self.node, self.done = writer, node, done
        self.opset = writer.opset
        self.stem = str(node.name or next(str(value.name) for value in node.outputs if value.name))

    @property
    def what(self) -> str:
        """The node, as messages name it."""
        return label(self.node)

    def input(self, index: int = 0) -> ir.Value:
        """An input of the node, which must have it."""
        value = self.node.inputs[index]
        assert value is not None, "the structure of the model was checked"
        return value

    def float_input(self) -> ir.Value:
        """The first input as float32, in which these operators compute whatever they are given."""
        value = self.input()
        return value if value.dtype is ir.DataType.FLOAT else self.cast(value, ir.DataType.FLOAT)

    def rows(self) -> ir.Value:
        """The first input as a float matrix: a vector is one row."""
        value = self.float_input()
        rank = None if self.input().shape is None else len(self.input().shape or ())
        if rank != 1:
            return value
        return self.apply("Reshape", value, self.constant([1, -1], "row", np.int64), what="row")

    def cast(self, value: ir.Value, to: ir.DataType) -> ir.Value:
        """`Cast`."""
        result = self.apply("Cast", value, to=int(to))
        result.type = ir.TensorType(to)
        return result

    def apply(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        domain: str = "",
        what: str = "",
        outputs: int = 1,
        **attributes: Attribute,
    ) -> ir.Value:
        """A node in front of the one that is rewritten; returns its first output."""
        stem = f"{self.stem}/{what or op_type.lower()}"
        new = self.writer.new_node(op_type, inputs, stem, attributes, domain=domain, outputs=outputs)
        assert isinstance(self.node.graph, ir.Graph)
        self.node.graph.insert_before(self.node, new)
        return new.outputs[0]

    def constant(
        self,
        array: npt.ArrayLike,
        what: str,
        dtype: npt.DTypeLike = np.float32,
        why: str = "a constant of the operator",
    ) -> ir.Value:
        """An initializer that never trains."""
        value = self.writer.store(np.asarray(array, dtype=dtype), f"{self.stem}/{what}")
        self.done.constants[str(value.name)] = why
        return value

    def weight(self, attribute: str, shape: Sequence[int]) -> ir.Value:
        """The numbers of an attribute as an initializer that trains, `<node>.<attribute>`.

        Raises:
            ModelError: there are more or fewer numbers than the shape holds.
        """
        numbers = np.asarray(self.floats(attribute), np.float32)
        expected = int(np.prod(shape))
        if numbers.size != expected:
            raise ModelError(
                f"{self.what}: its attribute {attribute!r} holds {numbers.size} numbers; expected {expected} "
                f"({' x '.join(map(str, shape))}). Export the model again."
            )
        value = self.writer.store(numbers.reshape(shape), f"{self.stem}.{attribute}")
        first = next(str(output.name) for output in self.node.outputs if output.name)
        value.metadata_props[KIND] = "PARAMETER"
        self.done.weights[str(value.name)] = AttributeWeight(first, attribute)
        return value

    def floats(self, attribute: str) -> tuple[float, ...]:
        """An attribute that is a list of floats; empty where it is absent."""
        found = self.node.attributes.get(attribute)
        return () if found is None else tuple(found.as_floats())

    def ints(self, attribute: str) -> tuple[int, ...]:
        """An attribute that is a list of integers; empty where it is absent."""
        found = self.node.attributes.get(attribute)
        return () if found is None else tuple(found.as_ints())

    def strings(self, attribute: str) -> tuple[str, ...]:
        """An attribute that is a list of strings; empty where it is absent."""
        found = self.node.attributes.get(attribute)
        return () if found is None else tuple(found.as_strings())

    def integer(self, attribute: str, default: int = 0) -> int:
        """An attribute that is an integer."""
        found = self.node.attributes.get(attribute)
        return default if found is None else found.as_int()

    def text(self, attribute: str, default: str) -> str:
        """An attribute that is a string."""
        found = self.node.attributes.get(attribute)
        return default if found is None else found.as_string()

    def is_used(self, index: int) -> bool:
        """Whether an output of the node is read, or is one of the graph's."""
        outputs = self.node.outputs
        return index < len(outputs) and (bool(outputs[index].uses()) or outputs[index].is_graph_output())

    def finish(self, *results: ir.Value | None, width: int | None = None) -> None:
        """Replaces the node's outputs by new values of the same names, and removes the node.

        `width` is the number of columns of the last result; without it, that has the shape of the input.
        """
        node, given = self.node, self.input().shape
        last = node.outputs[len(results) - 1]
        if last.type is None and width is None:
            last.type = self.input().type
        if last.type is not None and last.shape is None:
            rows = None if given is None else given[0] if len(given) > 1 else 1
            last.shape = given if width is None else ir.Shape([rows, width])
        for old, new in zip(node.outputs, results, strict=False):
            if new is None or not old.name:
                continue
            if new.producer() is None or new.producer() in _outside(node):
                new = self.apply("Identity", new)
            new.type, new.shape = old.type or new.type, old.shape
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            new.name, old.name = old.name, None
        assert isinstance(node.graph, ir.Graph)
        node.graph.remove(node, safe=True)


def _outside(node: ir.Node) -> set[ir.Node | None]:
    """The nodes that a node reads from."""
    return {None if value is None else value.producer() for value in node.inputs}


def is_classical(node: ir.Node) -> bool:
    """Whether a node is of the domain ai.onnx.ml."""
    return node.domain == ML_DOMAIN
