"""Axes of the tensors of a mixture of experts by what they count: tokens, choices of a token, experts, features.

A tensor that was reshaped, transposed or expanded keeps these names, so that patterns are told by meaning, not by form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import onnx_ir as ir

from onward.graph.nodes.known_values import Size


class Atom(NamedTuple):
    """One axis before it was merged with others: `N0`, `N1`.. tokens, `K` choices, `E` experts, `R` rows of one
    expert, `C` coordinates, `F` features, `W0`, `W1`.. of a weight."""

    label: str
    size: Size | None


Axes = tuple[tuple[Atom, ...], ...]
"""For each axis of a tensor what it is made of; nothing for an axis of size 1."""


class Derived(NamedTuple):
    """Shares that no value of the graph is: an operator of scores of the choices, or the gates at the choices."""

    op_type: str
    value: ir.Value


Shares = ir.Value | Derived
"""Of the choices of every token."""


@dataclass(frozen=True)
class Meaning:
    """What a value is within a mixture of experts.

    Attributes:
        kind: `chosen`, `shares`, `scores` (minus infinity but at the choices), `mask`, `gates` (zero but at the
            choices), `places`, `weight`, `body`, `weighted` or `sum`.
        axes: of the value.
        data: what else is known; the kind tells what.
        expert: the one expert that it is about; None: all.
    """

    kind: str
    axes: Axes
    data: Any = None
    expert: int | None = None

    def having(self, axes: Axes) -> Meaning:
        """The same with other axes."""
        return Meaning(self.kind, axes, self.data, self.expert)


def axis_of(axes: Axes, label: str) -> int | None:
    """The axis that consists of these atoms alone."""
    found = [index for index, group in enumerate(axes) if [atom.label for atom in group] == [label]]
    return found[0] if len(found) == 1 else None


def labels(axes: Axes) -> list[str]:
    """The labels of all axes in order."""
    return [atom.label for group in axes for atom in group]


def regroup(axes: Axes, sizes: Sequence[Size | None]) -> Axes | None:
    """The axes of a reshaped tensor, from the end and then from the front; one open size takes what is left.

    An axis of size 1 that has no place of its own, as the only choice of each token, joins the one before it.
    """
    atoms = [atom for group in axes for atom in group]
    back: list[tuple[Atom, ...]] = []
    front: list[tuple[Atom, ...]] = []
    left = list(sizes)
    while left and (taken := _take(atoms, left[-1], -1)) is not None:
        back.insert(0, taken)
        left.pop()
    while left and (taken := _take(atoms, left[0], 0)) is not None:
        front.append(taken)
        left.pop(0)
    if atoms and not left and front and all(atom.size == 1 for atom in atoms):
        front[-1] += tuple(atoms)
        atoms = []
    if len(left) > 1 or (atoms and not left):
        return None
    return (*front, *([tuple(atoms)] if left else []), *back)


def _take(atoms: list[Atom], size: Size | None, end: int) -> tuple[Atom, ...] | None:
    """Takes the atoms of one axis from an end of the list; None, and nothing taken, where it is not clear which."""
    if size is None or (isinstance(size, str) and not (atoms and atoms[end].size == size)):
        return None
    if isinstance(size, str) or (size == 1 and atoms and atoms[end].size == 1):
        return (atoms.pop(end),)
    taken: list[Atom] = []
    rest = list(atoms)
    while math.prod(int(atom.size or 0) for atom in taken) < size:
        if not rest or not isinstance(rest[end].size, int):
            return None
        taken.insert(0 if end else len(taken), rest.pop(end))
    if math.prod(int(atom.size or 0) for atom in taken) != size:
        return None
    atoms[:] = rest
    return tuple(taken)


def broadcast(left: Axes, right: Axes) -> Axes | None:
    """The axes of an elementwise result; None where two axes count different things."""
    rank = max(len(left), len(right))
    pairs = zip((*((),) * (rank - len(left)), *left), (*((),) * (rank - len(right)), *right), strict=True)
    found = []
    for one, other in pairs:
        if _larger(one) and _larger(other) and _larger(one) != _larger(other):
            return None
        found.append(max(one, other, key=lambda group: (bool(_larger(group)), len(group))))
    return tuple(found)


def _larger(group: tuple[Atom, ...]) -> list[Atom]:
    """What an axis is made of but for what has one element."""
    return [atom for atom in group if atom.size != 1]
