"""Which initializers hold one parameter of the module that was exported, though the file stores it several times.

The exporter's notes decide where there are any; else names it made up, the modules of the readers, and equal numbers.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from onward.graph.nodes import provenance
from onward.graph.weights.evidence import is_buffer_name, is_noted_constant
from onward.graph.weights.lifted_tensors import is_lifted
from onward.graph.weights.stored_tensor import StoredTensor, biases_of

LARGEST_FOLDED = 8192
"""Elements of the largest tensor that torch's exporter folds other than by a transpose."""

_SMALLEST_UNNOTED = 8
"""Elements of the smallest tensor whose numbers alone can say where it comes from."""


@dataclass(frozen=True, kw_only=True)
class CopyEvidence:
    """What is known of the origins of a graph's initializers.

    Attributes:
        origins: initializer -> the parameters that it holds or was computed from, as torch's exporter calls them;
            without an entry nothing was noted.
        paths: every prefix of the node names of torch's older exporter.
    """

    origins: Mapping[str, frozenset[str]]
    paths: provenance.ModulePaths
    _seen: dict[ir.Value, StoredTensor] = field(default_factory=dict)
    _taken: list[ir.Value] = field(default_factory=list)
    _of_sizes: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    _looked_up: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: ir.Graph) -> CopyEvidence:
        """Reads the exporter's notes."""
        named = {source for value in graph.initializers.values() for source in provenance.folded_sources(value)}
        found = ((str(value.name), _origins(value, named)) for value in graph.initializers.values())
        origins = {name: sources for name, sources in found if sources}
        return cls(origins=origins, paths=provenance.ModulePaths.of(graph))

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
        left, right = self.seen(copy), self.seen(original)
        if left.is_folded or not left.nodes.isdisjoint(right.nodes):
            return False
        if left.has_noted_kind:
            both_lifted = is_lifted(left.name) and is_lifted(right.name)
            return both_lifted and not left.modules.isdisjoint(right.modules)
        if left.size < _SMALLEST_UNNOTED or left.size > right.size:
            return False
        same_sizes = left.sizes == right.sizes
        if same_sizes and len(left.shape) == 2 and _is_tied_embedding(left, right):
            return True
        if not left.has_made_up_name or (not same_sizes and right.size > LARGEST_FOLDED):
            return False
        is_disjoint = bool(left.modules and right.modules) and left.modules.isdisjoint(right.modules)
        if left.shape == right.shape and left.biases and right.biases and left.biases.isdisjoint(right.biases):
            return None if is_disjoint or not (left.modules and right.modules) else True
        return not is_disjoint

    def take(self, original: ir.Value) -> None:
        """Takes an initializer for the original of those that follow."""
        seen, place = self.seen(original), len(self._taken)
        self._of_sizes.setdefault(seen.sizes, []).append(place)
        if seen.is_looked_up:
            self._looked_up.setdefault(seen.sizes, []).append(place)
        self._taken.append(original)

    def possible_originals(self, copy: ir.Value) -> list[ir.Value]:
        """Those taken so far of which `may_be_unnoted_copy` can be other than false; in their order.

        Thousands of layers have millions of pairs of weights: what can be told of one tensor is not asked of a pair.
        """
        left = self.seen(copy)
        if left.has_noted_kind:
            return [one for one in self._taken if is_lifted(self.seen(one).name)]
        known = self._of_sizes if left.has_made_up_name else self._looked_up
        places = known.get(left.sizes, [])
        if not left.has_made_up_name or left.size > LARGEST_FOLDED:
            return [self._taken[place] for place in places]
        larger = (at for sizes, at in self._of_sizes.items() if left.size <= math.prod(sizes) <= LARGEST_FOLDED)
        return [self._taken[place] for place in sorted({*places, *itertools.chain.from_iterable(larger)})]

    def seen(self, value: ir.Value) -> StoredTensor:
        """What names and readers tell of an initializer, looked up once."""
        if value not in self._seen:
            self._seen[value] = StoredTensor(value, self.paths)
        return self._seen[value]

    def forget(self, copy: ir.Value, original: ir.Value) -> None:
        """Has to be called before the readers of a copy read its original: they and their neighbours change."""
        places = self._looked_up.setdefault(self.seen(original).sizes, [])
        if (place := self._taken.index(original)) not in places:
            bisect.insort(places, place)  # perhaps it is from now on
        inputs = [one for use in copy.uses() for one in use.node.inputs if one is not None]
        producers = (one.producer() for one in inputs)
        neighbours = [one for node in producers if node is not None for one in node.inputs if one is not None]
        for value in (copy, original, *inputs, *neighbours):
            self._seen.pop(value, None)


def is_same_call(copy: ir.Value, original: ir.Value) -> bool:
    """Whether nodes of one kind read both at one input, in calls of one function that name the same parameters.

    Tensors that are filled with one number are copies of each other by nothing else.
    """
    left, right = _calls(copy), _calls(original)
    return bool(left) and left == right


def have_same_bias(copy: ir.Value, original: ir.Value) -> bool:
    """Whether the same stored tensor is added to the products with both."""
    return not biases_of(copy).isdisjoint(biases_of(original))


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


def _is_tied_embedding(copy: StoredTensor, original: StoredTensor) -> bool:
    """Whether a matrix is looked up in, or kept under its name where torch's older exporter made one up for the copy:
    it keeps a parameter, with its own name, where it is used as it is, too."""
    if original.is_looked_up:
        return True
    if not copy.name.startswith("onnx::") or original.has_automatic_name:
        return False
    return original.shape[0] != original.shape[1] or not original.is_symmetric
