"""What all ranks must agree on: at the start what they train and how much fits, after each update how to continue."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from onward.errors import ParametersError
from onward.parallel.launch.process import Mesh
from onward.parallel.messages import all_gather_json
from onward.parallel.rendezvous.rendezvous import name_ranks


def check_same(mesh: Mesh, digests: Mapping[str, str]) -> None:
    """Compares what every rank says of itself, name by name ("parameters", "model", "package version", ...).

    Raises:
        ParametersError: on every rank, with the names that differ and which ranks have which value.
    """
    if mesh.control is None:
        return
    everybody: list[dict[str, str]] = all_gather_json(mesh.control, dict(digests))
    names = dict.fromkeys(name for one in everybody for name in one)
    differing = []
    for name in names:
        values: dict[str, list[int]] = {}
        for rank, one in enumerate(everybody):
            values.setdefault(one.get(name, "nothing"), []).append(rank)
        if len(values) > 1:
            which = ", ".join(f"{_short(value)} on {name_ranks(ranks)}" for value, ranks in values.items())
            differing.append(f"{name}: {which}")
    if differing:
        raise ParametersError(
            "the ranks were started with different settings. "
            + "; ".join(differing)
            + ". Give every machine the same files, options and installation."
        )


class Heard(NamedTuple):
    """What all ranks agreed upon.

    Attributes:
        stops: whether any rank wants to stop.
        numbers: by name, the largest that any rank gave; None where none gave any.
    """

    stops: bool
    numbers: Mapping[str, float | None]


class UpdateAgreement:
    """What happens after an update, the same on every rank: whether to stop, and further numbers.

    If any rank wants to stop, all do. Of each number the largest counts, so that a rank that alone gives one decides.
    Between hosts eight bytes for each travel after each update, apart from the tensors' groups. They do so while the
    next update is computed, so that nobody waits for them, and what a rank gives is heard one update later.

    Args:
        mesh: the ranks.
        names: of the further numbers, the same on every rank.
    """

    def __init__(self, mesh: Mesh, names: Sequence[str] = ()) -> None:
        self.mesh = mesh
        self._nothing = Heard(False, dict.fromkeys(names))
        self._message = torch.zeros(1 + len(names), dtype=torch.float64)
        self._travels: dist.Work | None = None

    def after_update(self, wants_to_stop: bool, numbers: Mapping[str, float | None] | None = None) -> Heard:
        """What to do now, the same answer on every rank; all must ask after the same update.

        Args:
            wants_to_stop: this rank does.
            numbers: what this rank gives, by name; names that it leaves out are not given.
        """
        given = {**self._nothing.numbers, **(numbers or {})}
        if self.mesh.control is None:
            return Heard(wants_to_stop, given)
        self.mesh.membership.note_progress()
        heard = self.settle()
        if not heard.stops:
            values = [float(wants_to_stop), *(_NOTHING if number is None else number for number in given.values())]
            self._message.copy_(torch.tensor(values, dtype=torch.float64))
            self._travels = dist.all_reduce(self._message, op=dist.ReduceOp.MAX, group=self.mesh.control, async_op=True)
        return heard

    def settle(self) -> Heard:
        """What the ranks gave after the last update, unless it was heard already; all must ask."""
        if self._travels is None:
            return self._nothing
        self._travels.wait()
        self._travels = None
        stops, *found = self._message.tolist()
        numbers = zip(self._nothing.numbers, found, strict=True)
        return Heard(bool(stops), {name: None if number == _NOTHING else number for name, number in numbers})

    def stops_at_end(self, wants_to_stop: bool) -> bool:
        """Whether any rank wanted to stop until now; no update follows that the wish could travel with."""
        return self.after_update(wants_to_stop).stops or self.settle().stops


_NOTHING = -math.inf
"""What travels instead of a number that a rank does not give."""


def agree_on_any(mesh: Mesh, wanted: bool) -> bool:
    """Whether any rank wants something; all must ask, and all get the same answer."""
    return agree_on_least(mesh, -float(wanted)) < 0


def agree_on_least(mesh: Mesh, number: float) -> float:
    """The least of the numbers that the ranks have; all must ask, and all get the same answer."""
    if mesh.control is None:
        return number
    mesh.membership.note_progress()
    least = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=mesh.control)
    return float(least.item())


def gather_numbers(mesh: Mesh, number: float) -> list[float]:
    """The number that every rank has, in the order of the ranks; all must call this."""
    if mesh.control is None:
        return [number]
    mesh.membership.note_progress()
    return [row[0] for row in gather_rows(mesh, [number])]


def gather_rows(mesh: Mesh, row: Sequence[float]) -> list[list[float]]:
    """The row of numbers that every rank has, in the order of the ranks; of one length, and all must call this."""
    found: list[list[float]] = gather_codes(mesh, torch.tensor(row, dtype=torch.float64)).tolist()
    return found


def gather_codes(mesh: Mesh, codes: torch.Tensor) -> torch.Tensor:
    """The numbers of one type that every rank has, one row a rank; all must call this, with as many numbers."""
    row = codes.cpu()
    if mesh.control is None:
        return row.unsqueeze(0)
    found = [torch.empty_like(row) for _ in range(mesh.world_size)]
    dist.all_gather(found, row, group=mesh.control)
    return torch.stack(found)


def gather_texts(mesh: Mesh, text: str) -> list[str]:
    """The text that every rank has, in the order of the ranks; all must call this."""
    return [text] if mesh.control is None else all_gather_json(mesh.control, text)


def describe_processes(mesh: Mesh) -> list[str]:
    """Host and process of every rank, in their order; all must call this."""
    return gather_texts(mesh, f"{socket.gethostname()}, process {os.getpid()}")


def _short(value: str) -> str:
    """Digests are distinguished by their beginning."""
    return value if len(value) <= 24 else f"{value[:16]}..."
