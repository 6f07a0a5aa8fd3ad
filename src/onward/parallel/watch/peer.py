"""The one rank that a rank watches: whether its process and its heartbeats are there."""

from __future__ import annotations

from onward.deadline import Deadline
from onward.operating_system import is_running, process_state
from onward.parallel.rendezvous.rendezvous import PeerInfo, peer_info
from onward.parallel.rendezvous.run_store import ForeignEntryError, RunStore

BEAT_SECONDS = 0.5
"""Between two signs of life of a rank, and two looks at its neighbor's."""
SILENT_SECONDS = 25.0
"""A rank on another machine that gives no sign for so long is taken for dead, though no collective has failed yet: in
start-up and in evaluations there may be none for minutes."""


def describe_silent(rank: int, who: PeerInfo) -> str:
    """A rank that gives no sign, with what the operating system says of its process where it is near."""
    state = process_state(who.pid) if who.is_near() else None
    return f"rank {rank} on {who}" + ("" if state is None else f", which {state}")


class WatchedPeer:
    """The one rank that a rank looks after; around the ring everybody is looked after."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._who: PeerInfo | None = None
        self._last: tuple[bytes, Deadline] = (b"", Deadline(SILENT_SECONDS))

    def death(self, store: RunStore) -> str | None:
        """What to say if the neighbor is dead; None: it lives, has not come yet, or is done. Asked at every beat."""
        if not store.check([f"here/{self.rank}"]) or store.check([f"done/{self.rank}"]):
            return None
        if self._who is None:
            self._who = peer_info(store, self.rank)
        if self._who.is_near():
            if is_running(self._who.pid) or store.check([f"done/{self.rank}"]):
                return None
            return (
                f"rank {self.rank} ({self._who}) died without an error message: killed by a signal (the kernel does so "
                "when memory runs out), or crashed in a library; all ranks end."
            )
        beat = store.get(f"beat/{self.rank}") if store.check([f"beat/{self.rank}"]) else b""
        if beat != self._last[0]:
            self._last = (beat, Deadline(SILENT_SECONDS))
        self._last[1].count(BEAT_SECONDS)
        if not self._last[1].is_over:
            return None
        silent = self._last[1].waited_seconds
        return f"rank {self.rank} ({self._who}) has sent no heartbeat for {silent:.0f} s: dead, or unreachable."


def read_beat(rank: int, content: bytes) -> tuple[int, int]:
    """The heartbeats and the steps of progress that a rank has counted.

    Raises:
        ForeignEntryError: the entry is none of a rank's.
    """
    try:
        count, progress = content.split()
        return int(count), int(progress)
    except ValueError:
        raise ForeignEntryError(f"beat/{rank}", content) from None
