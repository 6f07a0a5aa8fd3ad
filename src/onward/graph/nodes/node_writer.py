"""Adding nodes to a graph in place. Operators whose form changed between opsets are written in the model's own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

Attribute = int | float | str | Sequence[int]


def value_names(graph: ir.Graph) -> set[str]:
    """Every value name of a graph, those of nested graphs included: no two values may share one."""
    names = {str(value.name) for value in (*graph.inputs, *graph.initializers.values())}
    for node in ir.traversal.RecursiveGraphIterator(graph):
        names.update(str(value.name) for value in node.outputs)
        for attribute in node.attributes.values():
            if attribute.type is ir.AttributeType.GRAPH:
                nested = attribute.as_graph()
                names.update(str(value.name) for value in (*nested.inputs, *nested.initializers.values()))
    return names


def free_name(name: str, taken: set[str]) -> str:
    """`name` if it is not taken, else `name_2`, `name_3`, ...; the name is taken from now on."""
    candidate, count = name, 1
    while candidate in taken:
        count += 1
        candidate = f"{name}_{count}"
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


class NodeWriter:
    """Appends nodes to a model's main graph under one name prefix, with names that nothing else has.

    Attributes:
        model, graph: what is written to.
        opset: version of the standard domain that the model imports.
        constants: names of the initializers written so far.
    """

    def __init__(self, model: ir.Model, prefix: str) -> None:
        self.model = model
        self.graph = model.graph
        self.opset = model.opset_imports[""]
        self.prefix = prefix
        self.constants: list[str] = []
        self._taken = value_names(model.graph)
        self._node_names = {str(node.name) for node in ir.traversal.RecursiveGraphIterator(model.graph)}

    def is_free(self, name: str) -> bool:
        """Whether no value of the model has this name."""
        return name not in self._taken

    def unique(self, name: str) -> str:
        """`name` if it is free, else `name_2`, `name_3`, ...; the name is taken from now on."""
        return free_name(name, self._taken)

    def apply(self, op_type: str, *inputs: ir.Value | None, name: str = "", **attributes: Attribute) -> ir.Value:
        """Appends a node of the standard domain and returns its one output, named like the node.

        `name` is what comes after the prefix, by default the operator in lower case.
        """
        stem = f"{self.prefix}{name or op_type.lower()}"
        value = ir.Value(name=self.unique(stem))
        node = ir.Node(
            "",
            op_type,
            list(inputs),
            [make_attribute(key, given) for key, given in attributes.items()],
            outputs=[value],
            name=self.unique_node_name(stem),
        )
        self.graph.append(node)
        return value

    def apply_own(self, domain: str, op_type: str, *inputs: ir.Value, name: str, **attributes: Attribute) -> ir.Value:
        """Appends a node of a domain of onward's own, which the model imports from then on."""
        self.model.opset_imports.setdefault(domain, 1)
        value = self.apply(op_type, *inputs, name=name, **attributes)
        node = value.producer()
        assert node is not None
        node.domain = domain
        return value

    def unique_node_name(self, stem: str) -> str:
        """`stem` if no node has that name, else `stem_2`, ...; ONNX Runtime refuses two nodes of one name."""
        return free_name(stem, self._node_names)

    def constant(self, array: npt.ArrayLike, name: str, dtype: npt.DTypeLike = np.int64) -> ir.Value:
        """Adds an initializer."""
        data = np.asarray(array, dtype=dtype)
        unique = self.unique(f"{self.prefix}{name}")
        tensor = ir.Tensor(data, name=unique)
        value = ir.Value(name=unique, shape=ir.Shape(data.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        self.graph.register_initializer(value)
        self.constants.append(unique)
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
        if self.opset < 13:
            return self.apply("Unsqueeze", value, axes=[axis])
        return self.apply("Unsqueeze", value, self.constant([axis], "unsqueeze_axes"))

    def squeeze(self, value: ir.Value, axis: int) -> ir.Value:
        """Drops an axis of size 1; the axes are an attribute before opset 13, an input since."""
        if self.opset < 13:
            return self.apply("Squeeze", value, axes=[axis])
        return self.apply("Squeeze", value, self.constant([axis], "squeeze_axes"))

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
