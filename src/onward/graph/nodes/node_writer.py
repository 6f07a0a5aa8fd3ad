"""Adding nodes to a graph in place. Operators whose form changed between opsets are written in the model's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onward.graph.nodes.iteration import every_node

Attribute = int | float | str | Sequence[int]


class TakenNames(set[str]):
    """Names that are taken, and the last number that each repeated name was given.

    Counting goes on from there: the thousandth name of one stem costs as much as the second.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        super().__init__(names)
        self.last: dict[str, int] = {}


def value_names(graph: ir.Graph) -> TakenNames:
    """Every value name of a graph, those of nested graphs included: no two values may share one."""
    names = TakenNames(str(value.name) for value in (*graph.inputs, *graph.initializers.values()))
    for node in every_node(graph):
        names.update(str(value.name) for value in node.outputs)
        for attribute in node.attributes.values():
            if attribute.type is ir.AttributeType.GRAPH:
                nested = attribute.as_graph()
                names.update(str(value.name) for value in (*nested.inputs, *nested.initializers.values()))
    return names


def node_names(graph: ir.Graph) -> TakenNames:
    """Every node name of a graph, those of nested graphs included."""
    return TakenNames(str(node.name) for node in every_node(graph))


def free_name(name: str, taken: TakenNames, separator: str = "_") -> str:
    """`name` if it is not taken, else `name_2`, `name_3`, ...; the name is taken from now on."""
    candidate = name
    while candidate in taken:
        taken.last[name] = taken.last.get(name, 1) + 1
        candidate = f"{name}{separator}{taken.last[name]}"
    taken.add(candidate)
    return candidate


def make_attribute(name: str, value: Attribute) -> ir.Attr:
    """An attribute of a node, its type that of the value."""
    if isinstance(value, int):
        return ir.AttrInt64(name, value)
    if isinstance(value, float):
        return ir.AttrFloat32(name, value)
    if isinstance(value, str):
        return ir.AttrString(name, value)
    return ir.AttrInt64s(name, list(value))


def original(value: ir.Value | None) -> ir.Value | None:
    """The value that an `Identity`, or several in a row, gives another name; itself, where none does."""
    while value is not None and (node := value.producer()) is not None and node.op_type == "Identity":
        value = node.inputs[0]
    return value


def remove_unread(graph: ir.Graph, value: ir.Value | None) -> None:
    """Removes a stored tensor that nothing reads any more, and the nodes that give it other names or hold it."""
    while value is not None and not value.uses() and not value.is_graph_output():
        node = value.producer()
        if node is None:
            graph.initializers.pop(str(value.name), None)
            return
        value = node.inputs[0] if node.inputs else None
        graph.remove(node, safe=True)


class NodeFactory:
    """Makes nodes and initializers of a model's main graph, under names that nothing else has.

    Attributes:
        model, graph: what is written to.
        opset: version of the standard domain that the model imports.
    """

    def __init__(self, model: ir.Model) -> None:
        self.model, self.graph = model, model.graph
        self.opset = model.opset_imports.get("", 1)
        self._taken = value_names(model.graph)
        self._node_names = node_names(model.graph)

    def unique(self, name: str) -> str:
        """`name` if no value has it, else `name_2`, `name_3`, ...; the name is taken from now on."""
        return free_name(name, self._taken)

    def unique_node_name(self, stem: str) -> str:
        """`stem` if no node has that name, else `stem_2`, ...; ONNX Runtime refuses two nodes of one name."""
        return free_name(stem, self._node_names)

    def new_node(
        self,
        op_type: str,
        inputs: Iterable[ir.Value | None],
        stem: str,
        attributes: Mapping[str, Attribute] | None = None,
        *,
        domain: str = "",
        copied: Iterable[ir.Attr] = (),
        outputs: int = 1,
    ) -> ir.Node:
        """A node, and values for its outputs, named `stem`; where it goes is up to the caller.

        Absent inputs at the end are left out; `copied` are attributes of another node.
        """
        given = list(inputs)
        while given and given[-1] is None:
            given.pop()
        if domain:
            self.model.opset_imports.setdefault(domain, 1)
        return ir.Node(
            domain,
            op_type,
            given,
            [*copied, *(make_attribute(key, value) for key, value in (attributes or {}).items())],
            outputs=[ir.Value(name=self.unique(stem)) for _ in range(outputs)],
            name=self.unique_node_name(stem),
        )

    def store(self, array: npt.NDArray[Any], name: str) -> ir.Value:
        """Adds an initializer."""
        unique = self.unique(name)
        return self.register_tensor(unique, ir.Tensor(array, name=unique))

    def register_tensor(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        """Adds an initializer of exactly this name."""
        shape = ir.Shape(tensor.shape.numpy())
        value = ir.Value(name=name, shape=shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def substitute(self, old: ir.Value, new: ir.Value, ending: str = "/replaced") -> None:
        """Lets a new value take the place, the name and the shape of an old one, which is left with another name."""
        name = old.name
        new.type, new.shape = new.type or old.type, old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name = self.unique(f"{name}{ending}")
        new.name = name


class NodeWriter(NodeFactory):
    """Appends nodes to a model's main graph under one name prefix.

    Attributes:
        prefix: begins all names.
        constants: names of the initializers written so far.
    """

    def __init__(self, model: ir.Model, prefix: str) -> None:
        super().__init__(model)
        self.prefix = prefix
        self.constants: list[str] = []

    def is_free(self, name: str) -> bool:
        """Whether no value of the model has this name."""
        return name not in self._taken

    def apply(self, op_type: str, *inputs: ir.Value | None, name: str = "", **attributes: Attribute) -> ir.Value:
        """Appends a node of the standard domain and returns its one output, named like the node.

        `name` is what comes after the prefix, by default the operator in lower case.
        """
        node = self.new_node(op_type, inputs, f"{self.prefix}{name or op_type.lower()}", attributes)
        self.graph.append(node)
        return node.outputs[0]

    def apply_own(self, domain: str, op_type: str, *inputs: ir.Value, name: str, **attributes: Attribute) -> ir.Value:
        """Appends a node of a domain of onward's own, which the model imports from then on."""
        node = self.new_node(op_type, inputs, f"{self.prefix}{name}", attributes, domain=domain)
        self.graph.append(node)
        return node.outputs[0]

    def constant(self, array: npt.ArrayLike, name: str, dtype: npt.DTypeLike = np.int64) -> ir.Value:
        """Adds an initializer."""
        value = self.store(np.asarray(array, dtype=dtype), f"{self.prefix}{name}")
        self.constants.append(str(value.name))
        return value

    def cast(self, value: ir.Value, to: ir.DataType) -> ir.Value:
        """`Cast`, whatever the value's type."""
        return self.apply("Cast", value, to=int(to))

    def reshape(self, value: ir.Value, sizes: Sequence[int] | ir.Value, name: str = "") -> ir.Value:
        """`Reshape` to sizes known now (one may be -1) or computed by the graph."""
        if not isinstance(sizes, ir.Value):
            sizes = self.constant(sizes, f"{name or 'reshape'}_sizes")
        return self.apply("Reshape", value, sizes, name=name)

    def unsqueeze(self, value: ir.Value, axis: int) -> ir.Value:
        """A new axis of size 1; the axes are an attribute before opset 13, an input since."""
        return self._along("Unsqueeze", value, axis)

    def squeeze(self, value: ir.Value, axis: int) -> ir.Value:
        """Drops an axis of size 1; the axes are an attribute before opset 13, an input since."""
        return self._along("Squeeze", value, axis)

    def _along(self, op_type: str, value: ir.Value, axis: int) -> ir.Value:
        if self.opset < 13:
            return self.apply(op_type, value, axes=[axis])
        return self.apply(op_type, value, self.constant([axis], f"{op_type.lower()}_axes"))

    def sum_over(self, value: ir.Value, axis: int, name: str = "") -> ir.Value:
        """Sum over one axis, which goes; the axes are an attribute before opset 13, an input since."""
        if self.opset < 13:
            return self.apply("ReduceSum", value, axes=[axis], keepdims=0, name=name)
        return self.apply("ReduceSum", value, self.constant([axis], "sum_axes"), keepdims=0, name=name)

    def reduce_all(self, value: ir.Value, reduction: str, name: str = "") -> ir.Value:
        """Mean or sum over all axes, to rank 0; the form without axes is the same in every opset."""
        op_type = {"mean": "ReduceMean", "sum": "ReduceSum"}[reduction]
        return self.apply(op_type, value, keepdims=0, name=name)

    def size_of(self, value: ir.Value, axis: int) -> ir.Value:
        """The size of one axis as a tensor of shape [1]; `axis` counts from the front."""
        index = self.constant([axis], "axis")
        return self.apply("Gather", self.apply("Shape", value), index, axis=0, name="size")
