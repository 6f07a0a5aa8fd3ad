"""What all ranks must agree on: at the start what they train and how much fits, after each update whether to stop."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from onward.errors import ParametersError
from onward.parallel.failure import note_progress
from onward.parallel.meeting import name_ranks
from onward.parallel.process import Mesh


def check_same(mesh: Mesh, digests: Mapping[str, str]) -> None:
    """Compares what every rank says of itself, name by name ("parameters", "model", "package version", ...).

    Raises:
        ParametersError: on every rank, with the names that differ and which ranks have which value.
    """
    if mesh.control is None:
        return
    everybody: list[dict[str, str]] = [{} for _ in range(mesh.world_size)]
    dist.all_gather_object(everybody, dict(digests), group=mesh.control)
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
            "the ranks were not started with the same things. "
            + "; ".join(differing)
            + ". Give every machine the same files, options and installation."
        )


class StopAgreement:
    """Whether to stop: if any rank wants to, all do, after the same update.

    Between hosts four bytes travel for each update, apart from the tensors' groups. They do so while the next update is
    computed, so that nobody waits for them, and a rank's wish is heard one update later.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._wish = torch.zeros(1, dtype=torch.int32)
        self._travels: dist.Work | None = None

    def after_update(self, wanted: bool) -> bool:
        """Whether to stop now, the same answer on every rank; all must ask after the same update."""
        if self.mesh.control is None:
            return wanted
        note_progress()
        heard = self._hear()
        if not heard:
            self._wish.fill_(int(wanted))
            self._travels = dist.all_reduce(self._wish, op=dist.ReduceOp.MAX, group=self.mesh.control, async_op=True)
        return heard

    def at_end(self, wanted: bool) -> bool:
        """Whether any rank wanted to stop until now; no update follows that the wish could travel beside."""
        return self.after_update(wanted) or self._hear()

    def _hear(self) -> bool:
        if self._travels is None:
            return False
        self._travels.wait()
        self._travels = None
        return bool(self._wish.item())


def agree_on_least(mesh: Mesh, number: float) -> float:
    """The least of the numbers that the ranks have; all must ask, and all get the same answer."""
    if mesh.control is None:
        return number
    note_progress()
    least = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=mesh.control)
    return float(least.item())


def gather_numbers(mesh: Mesh, number: float) -> list[float]:
    """The number that every rank has, in the order of the ranks; all must call this."""
    if mesh.control is None:
        return [number]
    note_progress()
    found = [torch.zeros(1, dtype=torch.float64) for _ in range(mesh.world_size)]
    dist.all_gather(found, torch.tensor([number], dtype=torch.float64), group=mesh.control)
    return [float(one.item()) for one in found]


def _short(value: str) -> str:
    """Digests are told apart by their beginning."""
    return value if len(value) <= 24 else f"{value[:16]}..."
