"""What an initializer's name, its sizes and the nodes that read it tell of where it comes from."""

from __future__ import annotations

import re
from functools import cached_property

import onnx_ir as ir

from onward.graph.nodes import provenance
from onward.graph.operators import operator

REARRANGING_CALL = re.compile(
    r"(chunk|expand|flatten|getitem|permute|repeat|reshape|select|slice|split|split_with_sizes|squeeze|t|transpose|"
    r"unbind|unflatten|unsqueeze|view)(_\d+)*"
)
"""How torch's exporter names what a call that moves elements made."""


class StoredTensor:
    """An initializer that is compared with others.

    Attributes:
        name, size, shape: its own.
        sizes: ascending; a transposed matrix has the same.
    """

    def __init__(self, value: ir.Value, paths: provenance.ModulePaths) -> None:
        assert value.const_value is not None
        self._value, self._paths = value, paths
        self.name = str(value.name)
        self.size = value.const_value.size
        self.shape = value.const_value.shape.numpy()
        self.sizes = tuple(sorted(self.shape))

    @cached_property
    def is_folded(self) -> bool:
        """Whether the exporter noted what it was computed from."""
        return bool(provenance.folded_sources(self._value))

    @cached_property
    def has_noted_kind(self) -> bool:
        """Whether the exporter noted what it is to its module."""
        return provenance.KIND in self._value.metadata_props

    @cached_property
    def has_automatic_name(self) -> bool:
        """Whether an exporter made its name up."""
        return provenance.is_automatic_name(self.name)

    @cached_property
    def has_made_up_name(self) -> bool:
        """Whether its name is no parameter's: an exporter's own, or that of a call which moves elements."""
        return self.has_automatic_name or REARRANGING_CALL.fullmatch(self.name) is not None

    @cached_property
    def nodes(self) -> frozenset[ir.Node]:
        """Those that read it as their parameter."""
        return frozenset(use.node for use in self._value.uses() if operator(use.node.op_type).is_parameter(use.idx))

    @cached_property
    def is_looked_up(self) -> bool:
        """Whether rows are taken of it."""
        return any(use.node.op_type == "Gather" for use in self._value.uses())

    @cached_property
    def is_symmetric(self) -> bool:
        """Whether a square matrix is its own transpose."""
        assert self._value.const_value is not None
        array = self._value.const_value.numpy()
        return bool((array == array.T).all())

    @cached_property
    def biases(self) -> frozenset[str]:
        """See `biases_of`."""
        return biases_of(self._value)

    @cached_property
    def modules(self) -> frozenset[str]:
        """The modules whose nodes read it, and the one that its name says it belongs to."""
        found = {
            provenance.module_scope(use.node)
            or provenance.path_scope(use.node, self._paths)
            or ("(root)" if provenance.has_scope(use.node) else "")
            for use in self._value.uses()
        }
        if found != {""} and not self.has_automatic_name:
            found.add(self.name.rpartition(".")[0])
        return frozenset(found - {""})


def biases_of(value: ir.Value) -> frozenset[str]:
    """The stored tensors that are added to the products with a weight: layers that share a weight share its bias."""
    found: set[str] = set()
    for use in value.uses():
        if use.node.op_type not in ("MatMul", "Gemm") or use.idx != 1:
            continue
        found.update(str(one.name) for one in use.node.inputs[2:] if one is not None and one.is_initializer())
        for later in use.node.outputs[0].uses():
            if later.node.op_type == "Add":
                others = (one for one in later.node.inputs if one is not None and one.is_initializer())
                found.update(str(one.name) for one in others)
    return frozenset(found)
