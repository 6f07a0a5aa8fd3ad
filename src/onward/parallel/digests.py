"""Digests of tensors, as fast as reading them, and what ranks that must hold the same bits make of each other's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bits, read as integers as wide as its elements, on its device.

    It wraps around, so that any change of a single element changes it: no error of one bit goes unnoticed. It is no
    protection against somebody who chooses what to change.
    """
    words = tensor.detach().reshape(-1).view(_WORDS[_width(tensor)])
    # Sums of a wider type than the elements' are converted one by one, which takes many times as long.
    kind = torch.int32 if words.dtype == torch.int32 else torch.int64
    return words.sum(dtype=kind).to(torch.int64)


def digests(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Of each of several tensors, one int64 each, on the device."""
    if not tensors:
        return torch.zeros(0, dtype=torch.int64, device=device)
    return torch.stack([digest(tensor).to(device) for tensor in tensors])


def _width(tensor: torch.Tensor) -> int:
    return 8 if tensor.dtype.is_complex else tensor.element_size()


@dataclass(frozen=True)
class Replicas:
    """Ranks that hold the same bits of a tensor.

    Attributes:
        name: of the tensor.
        places: of each of the ranks, where in its row of digests this tensor's is.
    """

    name: str
    places: Mapping[int, int]


def find_replicas(held: Sequence[Sequence[tuple[str, str]]]) -> list[Replicas]:
    """Tensors that several ranks hold the same elements of.

    Args:
        held: of every rank, in the order of its digests, the tensors' names and which elements they are.
    """
    found: dict[tuple[str, str], dict[int, int]] = {}
    for rank, one in enumerate(held):
        for place, (name, elements) in enumerate(one):
            found.setdefault((name, elements), {})[rank] = place
    return [Replicas(name, places) for (name, _), places in found.items() if len(places) > 1]


@dataclass(frozen=True)
class Difference:
    """Ranks that should hold the same bits of a tensor, and do not.

    Attributes:
        name: of the tensor.
        odd: ranks whose bits are not those of most; all of them where no value has a majority.
        ranks: all that should be equal.
    """

    name: str
    odd: tuple[int, ...]
    ranks: tuple[int, ...]


def find_differing(rows: torch.Tensor, replicas: Sequence[Replicas]) -> list[Difference]:
    """Compares all ranks' digests."""
    table = rows.tolist()
    found = []
    for one in replicas:
        values = {rank: table[rank][place] for rank, place in one.places.items()}
        counts = Counter(values.values()).most_common(2)
        if len(counts) == 1:
            continue
        is_majority = counts[0][1] > counts[1][1] and counts[0][1] * 2 > len(values)
        odd = tuple(rank for rank, value in values.items() if not is_majority or value != counts[0][0])
        found.append(Difference(one.name, odd, tuple(values)))
    return found
