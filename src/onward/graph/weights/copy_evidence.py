"""Which initializers hold one parameter of the module that was exported, though the file stores it several times.

The exporter's notes decide where there are any; else names it made up, the modules of the readers, and equal numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from onward.graph.nodes import provenance
from onward.graph.operators import operator
from onward.graph.weights.evidence import is_buffer_name, is_noted_constant
from onward.graph.weights.lifted_tensors import is_lifted

REARRANGING_CALL = re.compile(
    r"(chunk|expand|flatten|getitem|permute|repeat|reshape|select|slice|split|split_with_sizes|squeeze|t|transpose|"
    r"unbind|unflatten|unsqueeze|view)(_\d+)*"
)
"""How torch's exporter names what a call that moves elements made."""

LARGEST_FOLDED = 8192
"""Elements of the largest tensor that torch's exporter folds other than by a transpose."""

_SMALLEST_UNNOTED = 8
"""Elements of the smallest tensor whose numbers alone can say where it comes from."""


@dataclass(frozen=True)
class CopyEvidence:
    """What is known of the origins of a graph's initializers.

    Attributes:
        origins: initializer -> the parameters that it holds or was computed from, as torch's exporter calls them;
            without an entry nothing was noted.
        paths: every prefix of the node names of torch's older exporter.
    """

    origins: Mapping[str, frozenset[str]]
    paths: provenance.ModulePaths

    @classmethod
    def of(cls, graph: ir.Graph) -> CopyEvidence:
        """Reads the exporter's notes."""
        named = {source for value in graph.initializers.values() for source in provenance.folded_sources(value)}
        found = ((str(value.name), _origins(value, named)) for value in graph.initializers.values())
        return cls({name: origins for name, origins in found if origins}, provenance.ModulePaths.of(graph))

    def may_be_copy(self, copy: ir.Value, original: ir.Value) -> bool | None:
        """Whether the notes say that both come from one parameter; None: nothing is noted of one of them."""
        left, right = self.origins.get(str(copy.name)), self.origins.get(str(original.name))
        if left is None or right is None:
            return None
        return right <= left and provenance.KIND not in copy.metadata_props

    def may_be_unnoted_copy(self, copy: ir.Value, original: ir.Value) -> bool | None:
        """Whether names and readers say so, where no notes do; the numbers are still to be compared.

        None: only their readers speak against it, layers with other names or biases, which tied ones may have.
        """
        if provenance.folded_sources(copy) or _are_of_one_node(copy, original):
            return False
        if provenance.KIND in copy.metadata_props:
            both_lifted = is_lifted(str(copy.name)) and is_lifted(str(original.name))
            return both_lifted and not self._modules(copy).isdisjoint(self._modules(original))
        left, right = copy.const_value, original.const_value
        assert left is not None
        assert right is not None
        name = str(copy.name)
        same_sizes = sorted(left.shape.numpy()) == sorted(right.shape.numpy())
        if left.size < _SMALLEST_UNNOTED or left.size > right.size:
            return False
        if same_sizes and len(left.shape) == 2 and _is_tied_embedding(name, original):
            return True
        made_up = provenance.is_automatic_name(name) or REARRANGING_CALL.fullmatch(name) is not None
        if not made_up or (not same_sizes and right.size > LARGEST_FOLDED):
            return False
        modules, others = self._modules(copy), self._modules(original)
        biases, other_biases = _companions(copy), _companions(original)
        is_disjoint = bool(modules and others) and modules.isdisjoint(others)
        if left.shape == right.shape and biases and other_biases and biases.isdisjoint(other_biases):
            return None if is_disjoint or not (modules and others) else True
        return not is_disjoint

    @staticmethod
    def has_own_name(copy: ir.Value) -> bool:
        """Whether an initializer's name can be a parameter's: then only a matrix of the same sizes is its original
        for `may_be_unnoted_copy`."""
        name = str(copy.name)
        is_made_up = provenance.is_automatic_name(name) or REARRANGING_CALL.fullmatch(name) is not None
        return not is_made_up and provenance.KIND not in copy.metadata_props

    def _modules(self, value: ir.Value) -> set[str]:
        """The modules whose nodes read a tensor, and the one that its name says it belongs to."""
        found = {
            provenance.module_scope(use.node)
            or provenance.path_scope(use.node, self.paths)
            or ("(root)" if provenance.has_scope(use.node) else "")
            for use in value.uses()
        }
        if found != {""} and not provenance.is_automatic_name(str(value.name)):
            found.add(str(value.name).rpartition(".")[0])
        return found - {""}


def is_same_call(copy: ir.Value, original: ir.Value) -> bool:
    """Whether nodes of one kind read both at one input, in calls of one function that name the same parameters.

    Tensors that are filled with one number are copies of each other by nothing else.
    """
    left, right = _calls(copy), _calls(original)
    return bool(left) and left == right


def have_same_bias(copy: ir.Value, original: ir.Value) -> bool:
    """Whether the same stored tensor is added to the products with both."""
    return not _companions(copy).isdisjoint(_companions(original))


def _calls(value: ir.Value) -> set[tuple[str, int, str, tuple[str, ...]]]:
    calls = set()
    for use in value.uses():
        called = provenance.called_parameters(use.node)
        if not called:
            return set()
        calls.add((use.node.op_type, use.idx, provenance.call_target(use.node), called))
    return calls


def _origins(value: ir.Value, named: set[str]) -> frozenset[str]:
    name = str(value.name)
    kind = value.metadata_props.get(provenance.KIND)
    if kind is not None:
        return frozenset({provenance.placeholder(name)}) if kind == "PARAMETER" else frozenset()
    sources = provenance.folded_sources(value)
    if sources:
        return _of_sources(value, sources)
    if name in named:
        return frozenset({provenance.placeholder(name)})
    if not provenance.is_automatic_name(name):
        return frozenset()
    calls = {provenance.called_parameters(use.node) for use in value.uses()}
    return frozenset(next(iter(calls))) if len(calls) == 1 else frozenset()


def _of_sources(value: ir.Value, sources: tuple[str, ...]) -> frozenset[str]:
    kinds = provenance.declared_kinds(value.graph)
    stored = {} if value.graph is None else value.graph.initializers
    if kinds:
        if is_noted_constant(value):
            return frozenset()
        parameters = [source for source in sources if kinds.get(source) == "PARAMETER"]
    else:
        parameters = [
            source for source in sources if source in stored or ("." in source and not is_buffer_name(source))
        ]
    return frozenset(provenance.placeholder(source) for source in parameters)


def _are_of_one_node(left: ir.Value, right: ir.Value) -> bool:
    """Whether one node reads both as its parameters, as a recurrent layer does."""
    nodes = {use.node for use in right.uses() if operator(use.node.op_type).is_parameter(use.idx)}
    return any(use.node in nodes and operator(use.node.op_type).is_parameter(use.idx) for use in left.uses())


def _is_tied_embedding(copy: str, original: ir.Value) -> bool:
    """Whether a matrix is looked up in, or kept under its name where torch's older exporter made one up for the copy:
    it keeps a parameter, with its own name, where it is used as it is, too."""
    if any(use.node.op_type == "Gather" for use in original.uses()):
        return True
    if not copy.startswith("onnx::") or provenance.is_automatic_name(str(original.name)):
        return False
    assert original.const_value is not None
    array = original.const_value.numpy()
    return array.shape[0] != array.shape[1] or not bool((array == array.T).all())


def _companions(value: ir.Value) -> set[str]:
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
    return found
