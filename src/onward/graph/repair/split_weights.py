"""Weights that an exporter split: copies of one weight, each rearranged for the call that reads it, tied again.

Exporters fold what a call does with a parameter into its own tensor: the transpose for each call of a linear
layer, slices, the first step of a recurrent net repeated for each sample. Each would then be its own weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onward.graph.nodes import provenance
from onward.graph.nodes.node_writer import NodeWriter
from onward.graph.nodes.rearrangement import Rearrangement, find_permutation, find_rearrangement, is_equal
from onward.graph.reading.tensor_storage import close_file
from onward.graph.repair.merged_weights import SplitWeights
from onward.graph.repair.repeated_rows import tie_repeated_rows
from onward.graph.weights.copy_evidence import CopyEvidence, have_same_bias, is_same_call
from onward.graph.weights.gradients import TRAINABLE_TYPES
from onward.graph.weights.names import WeightNames, weight_names
from onward.spelling import shortened

_SHOWN = 6
"""So many names a note lists; the rest is counted."""


@dataclass(frozen=True)
class Tie:
    """An initializer that repeats the numbers of a weight, rearranged.

    One that repeats its own first row has the weight's name: what trains is the row.

    Attributes:
        weight: the weight's name.
        how: the copy is made of it.
        is_noted: the exporter noted that both are one parameter; else it is concluded from equal numbers.
    """

    weight: str
    how: Rearrangement
    is_noted: bool = True

    @property
    def relation(self) -> str:
        """What the copy is to the weight, in a word."""
        if self.how.elements is not None:
            return "rearranged"
        if self.how.shape is not None:
            return "repeated"
        return "copied" if self.how.is_identity else "transposed"


def tie_copies(
    model: ir.Model, untied: SplitWeights, keep: Sequence[str] = (), split: Sequence[str] = ()
) -> tuple[dict[str, Tie], dict[str, str]]:
    """Replaces initializers that are copies of others by nodes that compute them, in place.

    Args:
        model: as it is prepared for lowering.
        untied: what was split before; tensors of one family stay apart.
        keep: patterns of copies that are tied where the file leaves it open.
        split: patterns of those that are not tied by their numbers alone.

    Returns:
        The ties by the copy's name; and by initializer a sentence for each row that is repeated, and for copies and
        shared tensors of which the file does not say whether they are one weight.
    """
    ties, undecided = _tied(model, untied.families, keep, split)
    rows, notes = tie_repeated_rows(model)
    notes = untied.undecided | notes
    if undecided:
        first = next(iter(undecided))
        notes[first] = " ".join(filter(None, (notes.get(first), _note_on_undecided(undecided))))
    return {**ties, **{name: Tie(name, how) for name, how in rows.items()}}, notes


def _tied(
    model: ir.Model, families: Mapping[str, str], keep: Sequence[str], split: Sequence[str]
) -> tuple[dict[str, Tie], dict[str, str]]:
    """Copy -> tie, for every initializer that was replaced; and copy -> weight where nothing decides."""
    evidence = CopyEvidence.of(model.graph)
    noted: dict[str, list[ir.Value]] = {}
    known_as = weight_names(model.graph) if keep or split else WeightNames()
    ties, undecided = dict[str, Tie](), dict[str, str]()
    for copy in _candidates(model.graph):
        origins = evidence.origins.get(str(copy.name), frozenset())
        family = families.get(str(copy.name), "")
        known = dict.fromkeys(one for origin in sorted(origins) for one in noted.get(origin, ()))
        others = [one for one in known if not family or families.get(str(one.name)) != family]
        relations = ((one, _noted_relation(copy, one)) for one in others if evidence.may_be_copy(copy, one))
        found = next(((one, how) for one, how in relations if how is not None), None)
        is_noted = found is not None
        if found is None and not origins and not known_as.matches(str(copy.name), split):
            possible = evidence.possible_originals(copy)
            others = [one for one in possible if not family or families.get(str(one.name)) != family]
            may_be = {one: evidence.may_be_unnoted_copy(copy, one) for one in others}
            is_asked = known_as.matches(str(copy.name), keep)
            looked_at = [one for one, may in may_be.items() if may or (is_asked and may is None)]
            relations = ((one, _unnoted_relation(copy, one)) for one in looked_at)
            found = next(((one, how) for one, how in relations if how is not None), None)
            if found is None:
                equal = (one for one in others if may_be[one] is None and _is_permuted(copy, one))
                undecided |= {str(copy.name): str(one.name) for one in itertools.islice(equal, 1)}
        if found is not None:
            original, how = found
            ties[str(copy.name)] = Tie(str(original.name), how, is_noted)
            evidence.forget(copy, original)
            _replace(model, copy, original, how)
            continue
        evidence.take(copy)
        for origin in origins:
            noted.setdefault(origin, []).append(copy)
    for value in model.graph.initializers.values():
        close_file(value.const_value)
    return ties, undecided


def _candidates(graph: ir.Graph) -> list[ir.Value]:
    """Float initializers of several numbers that nodes read, in the order in which they are taken for originals:
    parameters under their own names first, of the others the larger first."""

    def rank(value: ir.Value) -> tuple[bool, bool, int]:
        assert value.const_value is not None
        folded = bool(provenance.folded_sources(value))
        made_up = provenance.is_automatic_name(str(value.name))
        return folded, made_up, -value.const_value.size if folded or made_up else 0

    found = [
        value
        for value in graph.initializers.values()
        if value.const_value is not None
        and value.const_value.dtype in TRAINABLE_TYPES
        and value.const_value.size > 1
        and value.uses()
    ]
    return sorted(found, key=rank)


def _noted_relation(copy: ir.Value, original: ir.Value) -> Rearrangement | None:
    """How a tensor was made of another that holds the same parameter."""
    how = _relation(copy, original)
    return how or (_as_it_is(copy, original) if is_same_call(copy, original) else None)


def _unnoted_relation(copy: ir.Value, original: ir.Value) -> Rearrangement | None:
    """How a tensor was made of another by its numbers, or by its layer's bias where it is filled with one number."""
    how = _relation(copy, original)
    return how or (_as_it_is(copy, original) if have_same_bias(copy, original) else None)


def _as_it_is(copy: ir.Value, original: ir.Value) -> Rearrangement | None:
    left, right = _array(copy), _array(original)
    return Rearrangement(tuple(range(left.ndim))) if is_equal(left, right) else None


def _relation(copy: ir.Value, original: ir.Value) -> Rearrangement | None:
    assert copy.const_value is not None
    assert original.const_value is not None
    if copy.const_value.dtype != original.const_value.dtype:
        return None
    return find_rearrangement(_array(copy), _array(original))


def _is_permuted(copy: ir.Value, original: ir.Value) -> bool:
    left, right = _array(copy), _array(original)
    return (
        left.dtype == right.dtype and find_permutation(left, right) is not None and bool((left != left.flat[0]).any())
    )


def _array(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return value.const_value.numpy()


def _replace(model: ir.Model, copy: ir.Value, original: ir.Value, how: Rearrangement) -> None:
    """Lets the readers of a copy read the original, by nodes at the begin of the graph where it is rearranged."""
    graph, source = model.graph, original
    if not how.is_identity:
        output = ir.Value(name=f"{copy.name}_tied", shape=copy.shape, type=copy.type)
        nodes = rearranging_nodes(model, how, original, str(copy.name), output)
        graph.insert_before(next(iter(graph)), nodes)
        source = output
    copy.replace_all_uses_with(source, replace_graph_outputs=True)
    graph.initializers.pop(str(copy.name))


def rearranging_nodes(
    model: ir.Model, how: Rearrangement, weight: ir.Value, name: str, output: ir.Value | None = None
) -> list[ir.Node]:
    """The nodes that compute a copy of a weight, the last of them giving `output`; their constants are added."""
    outputs = None if output is None else [output]
    writer = NodeWriter(model, "")
    node = f"tie_{name}"
    if how.elements is not None:
        flat = ir.node("Reshape", [weight, writer.constant([-1], f"{name}_flat")], name=f"{node}_flat")
        taken = ir.node(
            "Gather", [flat.outputs[0], writer.constant(how.elements, f"{name}_elements")], name=f"{node}_take"
        )
        flat.outputs[0].name, taken.outputs[0].name = writer.unique(f"{name}_as_row"), writer.unique(f"{name}_taken")
        sizes = writer.constant(how.shape or (), f"{name}_shape")
        return [flat, taken, ir.node("Reshape", [taken.outputs[0], sizes], outputs=outputs, name=node)]
    if how.shape is not None:
        sizes = writer.constant(how.shape, f"{name}_shape")
        return [ir.node("Expand", [weight, sizes], outputs=outputs, name=node)]
    if how.is_identity:
        return [ir.node("Identity", [weight], outputs=outputs, name=node)]
    return [ir.node("Transpose", [weight], {"perm": list(how.permutation)}, outputs=outputs, name=node)]


def notes_on_ties(ties: Mapping[str, Tie], weights: Collection[str], known_as: WeightNames) -> tuple[str, ...]:
    """A sentence for each weight that trains and of which the file holds copies."""
    concluded = [
        f"{copy!r} of {known_as.shown(tie.weight)!r}"
        for copy, tie in ties.items()
        if not tie.is_noted and tie.weight in weights
    ]
    told = (*_notes_on_equal(ties, weights, known_as), *_notes_on_others(ties, weights, known_as))
    return (*told, _note_on_concluded(concluded)) if concluded else told


def _notes_on_equal(ties: Mapping[str, Tie], weights: Collection[str], known_as: WeightNames) -> list[str]:
    copies: dict[str, list[str]] = {}
    for copy, tie in ties.items():
        if tie.how.is_identity and tie.weight in weights:
            copies.setdefault(tie.weight, []).append(copy)
    return [
        f"{known_as.shown(weight)!r} is stored {len(names) + 1} times, once for each call of its layer "
        f"({shortened(map(repr, names), _SHOWN)}); the copies are tied again and train as one weight."
        for weight, names in copies.items()
    ]


def _notes_on_others(ties: Mapping[str, Tie], weights: Collection[str], known_as: WeightNames) -> list[str]:
    notes = []
    for copy, tie in ties.items():
        if tie.how.is_identity or tie.weight not in weights or tie.weight == copy:
            continue
        weight = known_as.shown(tie.weight)
        if tie.how.elements is not None:
            what = (
                f"{copy!r} holds elements of {weight!r} in the shape {list(tie.how.shape or ())}, folded by the "
                "exporter"
            )
        elif tie.how.shape is not None:
            what = (
                f"{copy!r} is {weight!r} repeated to the shape {list(tie.how.shape)}, computed by the exporter for "
                "a batch of fixed size (as it does with the first step of a recurrent net that starts from zeros)"
            )
        elif tie.how.permutation == (1, 0):
            what = f"{copy!r} is the transpose of {weight!r}, folded by the exporter"
        else:
            what = f"{copy!r} is {weight!r} with its axes permuted, folded by the exporter"
        notes.append(f"{what}; they are tied again and train as one weight.")
    return notes


def _note_on_concluded(pairs: Sequence[str]) -> str:
    return (
        f"That these are copies is concluded from their equal numbers alone: {shortened(pairs, _SHOWN)}. If one is a "
        "weight of its own that was equal when exported, list it in training.untied_weights (untied_weights=[...] of "
        "onward.to_torch) to train it separately."
    )


def _note_on_undecided(undecided: Mapping[str, str]) -> str:
    listed = shortened((f"{copy!r} those of {weight!r}" for copy, weight in undecided.items()), _SHOWN)
    return (
        f"Tensors hold the same numbers as others that are read with another bias: {listed}. The file does not say "
        "whether each pair is one weight or was equal when exported, and they are trained separately. List the first "
        "of a pair in training.tied_weights to train it as one."
    )
