"""By which names people know a weight: its initializer's, which is its identity, and its path in the module it is of.

Exporters make up names such as `val_76`; what they note next to them, or the names of nodes, says which layer it is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import onnx_ir as ir

from onward.graph.nodes import provenance
from onward.graph.operators import Fact, operator, operators_with
from onward.spelling import shortened

_KERAS_ROLES = {
    **dict.fromkeys(
        ("MatMul", "Tensordot", "Conv2D", "Conv1D", "Conv3D", "convolution", "Conv2DBackpropInput", "einsum"), "kernel"
    ),
    **dict.fromkeys(("BiasAdd", "add"), "bias"),
    "depthwise": "depthwise_kernel",
    "embedding_lookup": "embeddings",
}
"""Name of TensorFlow's operation, the last part of a node's path, -> what Keras calls the weight that it reads."""

_MOVING = operators_with(Fact.SAME_ELEMENTS) | {"Cast", "Expand"}
_TF_PREFIX = re.compile(r"^(StatefulPartitionedCall|PartitionedCall|model|functional)(_\d+)?/")
_TF_VARIABLE = re.compile(r"/(ReadVariableOp|Read/ReadVariableOp|resource)(_\d+)?(:\d+)?$")


@dataclass(frozen=True)
class WeightNames:
    """The module paths of initializers, where they are known and say more than the name.

    Rules match either; messages show both.
    """

    paths: Mapping[str, str] = field(default_factory=dict)

    def shown(self, name: str) -> str:
        """`model.layers.0.q_proj.weight (val_76)`, or the name alone."""
        path = self.paths.get(name)
        return name if path is None else f"{path} ({name})"

    def of_gradients(self) -> WeightNames:
        """The same for gradients, which are called `<weight>_grad`."""
        return WeightNames({f"{name}_grad": f"{path}_grad" for name, path in self.paths.items()})

    def listed(self, names: Iterable[str], most: int) -> str:
        """The first names, the others counted."""
        return shortened(map(self.shown, names), most)

    def matches(self, name: str, patterns: str | Sequence[str]) -> bool:
        """Whether a pattern, or an exact name, is that of the initializer or of its module path."""
        every = (patterns,) if isinstance(patterns, str) else patterns
        known = (name, self.paths[name]) if name in self.paths else (name,)
        return any(one == pattern or fnmatchcase(one, pattern) for pattern in every for one in known)

    def is_named(self, name: str, patterns: Collection[str]) -> bool:
        """Whether a weight is named exactly, by either name."""
        return name in patterns or self.paths.get(name) in patterns

    def everything(self, names: Iterable[str]) -> list[str]:
        """The names and their paths, for hints."""
        every = list(names)
        return [*every, *(self.paths[name] for name in every if name in self.paths)]


def weight_names(graph: ir.Graph) -> WeightNames:
    """The module paths of a graph's initializers; two weights of one path are distinguished by `#2`, `#3`, ..."""
    targets = {provenance.placeholder(name): name for name in provenance.declared_kinds(graph)}
    prefixes = provenance.ModulePaths.of(graph)
    taken = set(graph.initializers)
    paths: dict[str, str] = {}
    for name, value in graph.initializers.items():
        if value.const_value is None or value.const_value.size < 1 or not value.uses():
            continue
        path = _path(value, targets, prefixes)
        if not path or path == name or (path in taken and path in graph.initializers):
            continue
        unique, count = path, 1
        while unique in taken:
            count += 1
            unique = f"{path}#{count}"
        taken.add(unique)
        paths[name] = unique
    return WeightNames(paths)


def _path(value: ir.Value, targets: Mapping[str, str], prefixes: provenance.ModulePaths) -> str:
    name = str(value.name)
    if provenance.KIND in value.metadata_props:
        return ""
    sources = [source for source in provenance.folded_sources(value) if source in targets.values()]
    if len(sources) == 1:
        return sources[0]
    variable = _TF_VARIABLE.sub("", name)
    if variable != name or _TF_PREFIX.match(name):
        return _of_tensorflow(variable)
    if "." in name and not provenance.is_automatic_name(name):
        return ""
    node, index = _reader(value)
    is_scalar = value.const_value is not None and not value.const_value.shape.dims
    return "" if node is None else _of_reader(node, index, targets, prefixes, is_scalar)


def _reader(value: ir.Value) -> tuple[ir.Node | None, int]:
    """The node that computes with a tensor; nodes that only move its elements are passed."""
    for _ in range(4):
        uses = value.uses()
        if not uses:
            return None, 0
        node, index = next(iter(uses))
        if node.op_type not in _MOVING:
            return node, index
        value = node.outputs[0]
    return None, 0


def _of_reader(
    node: ir.Node, index: int, targets: Mapping[str, str], prefixes: provenance.ModulePaths, is_scalar: bool
) -> str:
    role = operator(node.op_type).parameter_name(index)
    called = [targets[one] for one in provenance.called_parameters(node) if one in targets]
    fitting = [one for one in called if one.rpartition(".")[2].startswith(role)] if role else []
    if len(fitting) == 1:
        return fitting[0]
    scope = provenance.module_scope(node) or provenance.path_scope(node, prefixes)
    if scope:
        # A number, such as the epsilon of a norm, is no parameter of its module.
        return f"{scope}.{role}" if role and not is_scalar else ""
    if _TF_PREFIX.match(str(node.name)):
        return _of_tensorflow(str(node.name))
    return ""


def _of_tensorflow(path: str) -> str:
    """`StatefulPartitionedCall/net/dense/MatMul` -> `net.dense.kernel`."""
    while _TF_PREFIX.match(path) and path.count("/") > 1:
        path = _TF_PREFIX.sub("", path, count=1)
    parts = [part for part in re.sub(r":\d+$", "", path).split("/") if part]
    if not parts:
        return ""
    role = _KERAS_ROLES.get(re.sub(r"_\d+$", "", parts[-1]))
    return ".".join([*parts[:-1], role] if role and len(parts) > 1 else parts)
