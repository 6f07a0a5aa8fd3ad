"""Names a rank that is slower than its peers, which collectives hide: every rank's own work, compared now and then."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from onward.engine.loop import Clock, StepDone, is_due
from onward.engine.state import TrainState
from onward.parallel.agreement import describe_processes, gather_rows
from onward.parallel.watch.waiting import WaitClock
from onward.plan.topology import Topology

LEAST_LAG_SECONDS = 0.01
"""A rank that is behind by less in an update is not worth a message, however short its updates are."""
CONFIRMATIONS = 2
"""Comparisons in a row that must find the same rank slow: one may have met a moment of other work."""


@dataclass(frozen=True, kw_only=True)
class Lag:
    """A rank that is slow, in an update.

    Attributes:
        rank: which.
        own_seconds: of its own work, without waiting for others.
        expected_seconds: what its peers take; of the only rank of a stage, what it took itself when it was fastest, as
            much slower as the other stages have become since.
        data_seconds: of its own work, waiting for data.
        has_peers: whether other ranks do the same work.
    """

    rank: int
    own_seconds: float
    expected_seconds: float
    data_seconds: float
    has_peers: bool

    def words(self, process: str, update: int) -> str:
        """For the user.

        Args:
            process: host and number of the rank's process.
            update: in which it was found.
        """
        whom = "the median of the ranks that do the same work" if self.has_peers else "what it took before"
        lag = self.own_seconds - self.expected_seconds
        share = self.data_seconds / max(self.own_seconds, 1e-9)
        cause = (
            f"{self.data_seconds:.2f} s of it is waiting for data: check the disk or network that its shards are on."
            if share > 0.5
            else "Look for other programs on that machine, throttled hardware, and longer samples in its data."
        )
        return (
            f"rank {self.rank} ({process}) is slow: its own work takes {self.own_seconds:.2f} s of update {update}, "
            f"{whom} is {self.expected_seconds:.2f} s, so that every update waits {lag:.2f} s for it. {cause} "
            "distributed.slow_rank_ratio sets when this is reported."
        )


@dataclass(kw_only=True)
class SlowRankDetector:
    """Finds slow ranks in tables of all ranks' own work; the same on every rank.

    Attributes:
        topology: which ranks do the same work: those of a stage.
        ratio: own work compared with that of peers, above which a rank is slow.
    """

    topology: Topology
    ratio: float
    _fastest: dict[int, float] = field(default_factory=dict)
    _times_slow: dict[int, int] = field(default_factory=dict)
    _reported: set[int] = field(default_factory=set)

    def compare(self, rows: Sequence[tuple[float, float]]) -> tuple[list[Lag], list[int]]:
        """Ranks that are to be reported as slow now, and those reported before that are slow no longer.

        Args:
            rows: own work and waiting for data in seconds, of every rank.
        """
        slow, recovered = [], []
        for rank, (own, _) in enumerate(rows):
            self._fastest[rank] = min(own, self._fastest.get(rank, own))
        for rank, (own, data) in enumerate(rows):
            expected, has_peers = self._expected(rank, [own for own, _ in rows])
            if own <= self.ratio * expected or own - expected < LEAST_LAG_SECONDS:
                self._times_slow[rank] = 0
                if rank in self._reported:
                    self._reported.remove(rank)
                    recovered.append(rank)
                continue
            self._times_slow[rank] = self._times_slow.get(rank, 0) + 1
            if self._times_slow[rank] >= CONFIRMATIONS and rank not in self._reported:
                self._reported.add(rank)
                slow.append(
                    Lag(rank=rank, own_seconds=own, expected_seconds=expected, data_seconds=data, has_peers=has_peers)
                )
        return slow, recovered

    def _expected(self, rank: int, own: Sequence[float]) -> tuple[float, bool]:
        stage = self.topology.place(rank).pipeline
        others = [other for other in range(self.topology.world_size) if other != rank]
        peers = [other for other in others if self.topology.place(other).pipeline == stage]
        if peers:
            return statistics.median(own[peer] for peer in peers), True
        slowdown = statistics.median(own[other] / max(self._fastest[other], 1e-9) for other in others)
        return self._fastest[rank] * slowdown, False


class SlowRanks:
    """Measures every so many updates what each rank does by itself, and reports a rank that all others wait for.

    Args:
        state: of the run.
        wait_clock: measures.
        clock: of the round, which knows how long data were waited for.
        period: weight updates between two comparisons; 0: none.
        ratio: see `SlowRankDetector`.
        notify: takes sentences for the user.
    """

    def __init__(
        self,
        state: TrainState,
        wait_clock: WaitClock,
        clock: Clock,
        period: int,
        ratio: float,
        notify: Callable[[str], None],
    ) -> None:
        self._state, self._wait_clock, self._clock = state, wait_clock, clock
        self._period, self._notify = period, notify
        self._lags = SlowRankDetector(topology=state.mesh.topology, ratio=ratio)
        self._data_seconds = 0.0

    def watched(self, steps: Iterator[StepDone]) -> Iterator[StepDone]:
        """The same steps; those of an update that is compared are measured."""
        if self._state.mesh.control is None or not self._period:
            yield from steps
            return
        while True:
            is_measured = is_due(self._state.counters.update + 1, self._period)
            done = self._measured(steps) if is_measured else next(steps, None)
            if done is None:
                return
            if is_measured and done.is_update:
                self._compare()
            yield done

    def _measured(self, steps: Iterator[StepDone]) -> StepDone | None:
        before = self._clock.data_wait_seconds
        with self._wait_clock.measuring():
            done = next(steps, None)
        self._data_seconds += self._clock.data_wait_seconds - before
        return done

    def _compare(self) -> None:
        own, _ = self._wait_clock.take_seconds()
        data, self._data_seconds = self._data_seconds, 0.0
        rows = gather_rows(self._state.mesh, [own, data])
        slow, recovered = self._lags.compare([(own, data) for own, data in rows])
        if slow:
            processes = describe_processes(self._state.mesh)
            for lag in slow:
                self._notify(lag.words(processes[lag.rank], self._state.counters.update))
        for rank in recovered:
            self._notify(f"rank {rank} keeps up with the others again, in update {self._state.counters.update}.")
