"""Silent corruption of weights and moments: digests at rest and across replicas, every so many updates and before each
checkpoint; what differs stops all ranks alike."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from onward.engine.loop import StepDone, is_due
from onward.engine.state import TrainState
from onward.errors import CorruptionError
from onward.parallel.agreement import describe_processes, gather_codes, gather_texts
from onward.parallel.digests import Difference, Replicas, digests, find_differing, find_replicas
from onward.parallel.rendezvous.rendezvous import name_ranks
from onward.spelling import shortened

_LISTED = 8
_AT_REST = re.compile(r"(workers/\d+/)?(weights|slots)/|outer/")
_UNTOUCHED = -1
GO_BACK = (
    "Checkpoints hold only what all replicas agreed on: the same command resumes from the last one. If it happens "
    "again on the same machine, remove that machine and test its memory and processors."
)


class StateDigests:
    """Digests of what every rank holds of the train state, and which ranks must agree on them.

    Args:
        state: of the run.
        is_deterministic: equal work gives equal bits on every rank. On GPUs it need not, and copies of a weight that
            tensor-parallel ranks compute apart are then not compared; replicas take the same mean of gradients in any
            case.
    """

    def __init__(self, state: TrainState, is_deterministic: bool) -> None:
        self._state = state
        self._is_exact = is_deterministic or state.device.type == "cpu"
        self._names: tuple[str, ...] | None = None
        self._replicas: list[Replicas] = []
        self._width = 0

    def check(self, changed: str | None = None) -> None:
        """Compares all replicas; every rank must call this after the same update.

        Args:
            changed: a tensor of this rank that has changed while nothing should write to it.

        Raises:
            CorruptionError: on every rank, naming ranks, their machines and the tensors that differ.
        """
        tensors = {
            name: sharded for name, sharded in self._state.sharded_tensors().items() if not name.startswith("random/")
        }
        if tuple(tensors) != self._names:
            held = json.dumps([(name, self._elements_of(name, sharded.shards)) for name, sharded in tensors.items()])
            texts = gather_texts(self._state.mesh, held)
            everybody = [[(str(name), str(elements)) for name, elements in json.loads(text)] for text in texts]
            self._replicas = find_replicas(everybody)
            self._width = max(map(len, everybody))
            self._names = tuple(tensors)
        mine = digests([sharded.tensor for sharded in tensors.values()], self._state.device).cpu()
        row = torch.zeros(1 + self._width, dtype=torch.int64)
        row[0] = _UNTOUCHED if changed is None else tuple(tensors).index(changed)
        row[1 : 1 + len(mine)] = mine
        rows = gather_codes(self._state.mesh, row)
        at_rest = {rank: place for rank, place in enumerate(rows[:, 0].tolist()) if place != _UNTOUCHED}
        differing = find_differing(rows[:, 1:], self._replicas)
        if at_rest or differing:
            processes = describe_processes(self._state.mesh)
            names = gather_texts(self._state.mesh, changed or "")
            update = self._state.counters.update
            found = {rank: [names[rank]] for rank in at_rest}
            raise CorruptionError(_words(found, differing, processes, update))

    def at_rest(self) -> tuple[list[str], torch.Tensor]:
        """What only an update may change on this rank, maybe nothing: names, and their digests on the device."""
        tensors = {n: sharded.tensor for n, sharded in self._state.sharded_tensors().items() if _AT_REST.match(n)}
        return list(tensors), digests(list(tensors.values()), self._state.device)

    def _elements_of(self, name: str, shards: Iterable[object]) -> str:
        """Which elements of a tensor these are, and whose copies are compared with them."""
        place = self._state.mesh.place
        apart = "" if self._is_exact else f"{place.pipeline}.{place.horizontal}"
        # A statistic is what each stage and tensor-parallel rank found by itself.
        return f"{apart}{tuple(shards)!r}" if _AT_REST.match(name) else f"{place.pipeline}{place.horizontal}{shards}"


class IntegrityWatch:
    """Checks the train state around every so many updates.

    Args:
        state: of the run.
        period: weight updates between two checks; 0: none.
        is_deterministic: see `StateDigests`.
    """

    def __init__(self, state: TrainState, period: int, is_deterministic: bool) -> None:
        self._state, self._period = state, period
        self._digests = StateDigests(state, is_deterministic)
        self._changed: str | None = None

    def watched(self, steps: Iterator[StepDone]) -> Iterator[StepDone]:
        """The same steps; between its start and the change of the weights, nothing may touch them in a checked update.

        Raises:
            CorruptionError: see `StateDigests.check`.
        """
        before: torch.Tensor | None = None
        while True:
            is_checked = is_due(self._state.counters.update + 1, self._period)
            if is_checked and before is None:
                _, before = self._digests.at_rest()
            if before is None:
                done = next(steps, None)
            else:
                done = self._checked(steps, before)
            if done is None:
                return
            if before is not None and done.is_update:
                before, changed, self._changed = None, self._changed, None
                self._digests.check(changed)
            yield done

    def _checked(self, steps: Iterator[StepDone], before: torch.Tensor) -> StepDone | None:
        looked: list[bool] = []

        def look(*_: Any) -> None:
            if looked:  # inside a backward pass every weight has its own step, and the first has changed weights
                return
            looked.append(True)
            names, after = self._digests.at_rest()
            same = (before == after).tolist()
            self._changed = next((name for name, is_same in zip(names, same, strict=True) if not is_same), None)

        handle = self._state.optimizer.register_step_pre_hook(look)
        try:
            return next(steps, None)
        finally:
            handle.remove()


def _words(
    at_rest: Mapping[int, list[str]],
    differing: Sequence[Difference],
    processes: list[str],
    update: int,
) -> str:
    parts = []
    for rank, names in at_rest.items():
        parts.append(
            f"on rank {rank} ({processes[rank]}) {_shown(names)} changed between two weight updates, while nothing "
            "writes to it"
        )
    by_ranks: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for one in differing:
        by_ranks.setdefault((one.odd, one.ranks), []).append(one.name)
    for (odd, ranks), names in by_ranks.items():
        who = shortened((f"rank {rank} on {processes[rank]}" for rank in odd), _LISTED, "; ")
        if len(odd) == len(ranks):
            parts.append(f"{name_ranks(ranks)} hold different bits of {_shown(names)}, which must be equal ({who})")
        else:
            others = [rank for rank in ranks if rank not in odd]
            verb = "holds" if len(odd) == 1 else "hold"
            parts.append(f"{name_ranks(odd)} {verb} other bits of {_shown(names)} than {name_ranks(others)} ({who})")
    return (
        f"silent corruption at update {update}: {'; '.join(parts)}. A bit in memory or a computation went wrong, or a "
        f"callback changed weights on some ranks only. {GO_BACK}"
    )


def _shown(names: list[str]) -> str:
    return shortened((repr(name.removeprefix("weights/")) for name in names), _LISTED)
