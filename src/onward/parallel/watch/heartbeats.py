"""A thread on every rank that shows others that it lives, and ends it when another rank has failed or died.

Ranks talk through the store of their start: the first failure written there is the cause of the end of all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from onward.deadline import Deadline
from onward.parallel.rendezvous.launcher import LAUNCHED_BY_US, Launch
from onward.parallel.rendezvous.rendezvous import name_ranks, peer_info
from onward.parallel.rendezvous.run_store import ForeignEntryError, RunStore
from onward.parallel.watch.cause import Cause, cause_of, leave_cause
from onward.parallel.watch.ending import end_process, exit_code_of, is_echo, notify, words
from onward.parallel.watch.flight_recorder import STORE_GUARD, FlightRecorder
from onward.parallel.watch.peer import BEAT_SECONDS, WatchedPeer, describe_silent, read_beat

DIAGNOSIS_SECONDS = 3.0
"""After a failed collective: how long to look for the rank that caused it, before it is reported as it is."""
SHOWING_SECONDS = 5.0
"""How long the other ranks wait for the words of the first failure to be on the screen before they end."""
SHUTDOWN_GRACE_SECONDS = 5.0
"""How long the rank that failed first stays to let the others read why."""
STORE_SECONDS = 20.0
"""How long the store may take to answer; a connection through a cut cable would wait for many minutes."""
CONTINUED_SECONDS = 2.0
RECORDING_SECONDS = 15.0
"""How long the other ranks wait for the one that collects what all of them were doing."""

_TIMEOUT = re.compile(r"timed? ?out", re.IGNORECASE)


@dataclass(frozen=True)
class Failure:
    """Why the run ended: who found it, the words, the exit code of all, and a number that no other failure has."""

    rank: int
    text: str
    exit_code: int
    number: int = field(default_factory=lambda: random.SystemRandom().getrandbits(64))

    def written(self) -> str:
        """For the store."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def read(content: bytes) -> Failure:
        """What a rank wrote.

        Raises:
            ForeignEntryError: somebody else wrote there.
        """
        try:
            found = json.loads(content)
            return Failure(int(found["rank"]), str(found["text"]), int(found["exit_code"]), int(found["number"]))
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ForeignEntryError("failure", content) from None


class HeartbeatMonitor:
    """The thread that tells others that this rank lives, and ends this process when another one failed.

    Args:
        store: of this start; the watch talks through its own connection.
        launch: this process among the others.
        timeout_seconds: of collectives, for messages.
        folder: of the file that tells where every rank is when they hang.
    """

    def __init__(self, store: RunStore, launch: Launch, timeout_seconds: float, folder: Path | None = None) -> None:
        self.launch = launch
        self.timeout_seconds = timeout_seconds
        self.progress = 0
        self._recorder = FlightRecorder(rank=launch.rank, world_size=launch.world_size, folder=folder)
        self._store: RunStore = store.clone()
        self._lock = threading.Lock()
        self._ending = threading.Lock()
        self._stopping = threading.Event()
        self.leaving: tuple[Deadline, int] | None = None
        self._beats_before: dict[int, tuple[int, int]] = {}
        self._silent: list[int] = []
        self._dead = 0
        self._recorder.begin(self._store)
        self._thread = threading.Thread(target=self._run, name="onward watch", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ the main thread

    def report(self, error: BaseException) -> tuple[Failure, bool]:
        """Tells all ranks that this one failed; returns the first failure of all, and whether it is this one."""
        if is_echo(error):
            self._recorder.note(error)
            first = self._first_after(DIAGNOSIS_SECONDS)
            if first is not None:
                return first, False
            mine = Failure(self.launch.rank, self._diagnose(error), 1)
            file = self._recorder.collect(self._talk, self._store, mine.text)
            if file is None:  # another rank writes it, and then reports
                first = self._first_after(RECORDING_SECONDS)
                if first is not None:
                    return first, False
            else:
                text = f"{mine.text}\nWhat every rank was doing (stacks, last collectives, updates): {file}"
                mine = dataclasses.replace(mine, text=text)
            cause = Cause("hang", mine.text, self.progress)
        else:
            mine = Failure(self.launch.rank, words(error), exit_code_of(error))
            cause = cause_of(error, mine.text, self.progress)
        first = self.publish(mine)
        if first == mine:
            leave_cause(cause)
        return first, first == mine

    def publish(self, failure: Failure) -> Failure:
        """Writes a failure into the store, unless there is one; returns the one that is there."""
        with self._talk():
            return Failure.read(self._store.compare_set("failure", "", failure.written()))

    def let_end(self, exit_code: int) -> NoReturn:
        """After the failure was shown: lets the others end, and ends."""
        self.leaving = (Deadline(2 * SHUTDOWN_GRACE_SECONDS), exit_code)
        with contextlib.suppress(dist.DistError):
            with self._talk():
                self._store.set("shown", "")
                came = sum(self._store.check([f"here/{rank}"]) for rank in range(self.launch.world_size))
            self._dead = max(self._dead, self.launch.world_size - came)  # who never came does not see it either
            self._wake_silent()
            self._wait_for("seen", self.launch.world_size - 1 - self._dead, SHUTDOWN_GRACE_SECONDS)
        self._leave(exit_code)

    def end_after_showing(self, exit_code: int) -> NoReturn:
        """Ends this process once the failure was shown elsewhere: launchers kill the rest as soon as one has ended."""
        self.leaving = (Deadline(2 * SHOWING_SECONDS), exit_code)
        deadline = Deadline(SHOWING_SECONDS)
        with contextlib.suppress(dist.DistError):
            while not deadline.is_over:
                with self._talk():
                    if self._store.check(["shown"]):
                        break
                deadline.pause(BEAT_SECONDS / 10)
            with self._talk():
                self._store.add("seen", 1)
        self._leave(exit_code)

    def _wake_silent(self) -> None:
        """A process of this machine that somebody stopped continues and sees that all end; a signal would only wait."""
        for rank in self._silent:
            with self._talk():
                who = peer_info(self._store, rank)
            if who.is_near():
                with contextlib.suppress(OSError):
                    os.kill(who.pid, signal.SIGCONT)

    def _leave(self, exit_code: int) -> NoReturn:
        """Ends this process; rank 0, whose store it may be, goes last."""
        with contextlib.suppress(dist.DistError):
            with self._talk():
                self._store.add("left", 1)
            if self.launch.rank == 0 and not self.launch.agent_store:
                self._wait_for("left", self.launch.world_size - self._dead, SHUTDOWN_GRACE_SECONDS)
        end_process(exit_code)

    def meet_at_end(self, name: str, seconds: float) -> bool:
        """Waits until all ranks have come to the same end; False: they did not come."""
        with self._talk():
            self._store.add(name, 1)
        return self._wait_for(name, self.launch.world_size, seconds)

    def stop(self) -> None:
        """Ends the watch of a rank that is done; rank 0, whose store it may be, waits until all are."""
        self._stopping.set()
        self._thread.join(BEAT_SECONDS * 4)
        self._recorder.end()
        with contextlib.suppress(dist.DistError), self._talk():
            self._store.set(f"done/{self.launch.rank}", "")
            self._store.add("done", 1)
        if self.launch.rank == 0 and not self.launch.agent_store:
            self._wait_for("done", self.launch.world_size, SHUTDOWN_GRACE_SECONDS)

    def _wait_for(self, name: str, count: int, seconds: float) -> bool:
        deadline = Deadline(seconds)
        with contextlib.suppress(dist.DistError):
            while not deadline.is_over:
                with self._talk():
                    if self._store.add(name, 0) >= count:
                        return True
                deadline.pause(BEAT_SECONDS / 10)
        return False

    def _first_after(self, seconds: float) -> Failure | None:
        """A collective failed: time for the rank that caused it to say so, and for the others to notice, too."""
        with self._talk():
            self._store.set(f"echo/{self.launch.rank}", "")
        self._beats_before, deadline = self._beats(), Deadline(seconds)
        while not deadline.is_over:
            first = self._first()
            if first is not None:
                return first
            deadline.pause(BEAT_SECONDS / 5)
        return None

    def _diagnose(self, error: BaseException) -> str:
        """What is known of the rank that caused a failed collective: ended, silent, or busy with something else."""
        beats = self._beats()
        with self._talk():
            gone = [rank for rank in beats if self._store.check([f"done/{rank}"])]
            busy = [rank for rank in beats if not self._store.check([f"echo/{rank}"])]
        silent = [rank for rank in busy if beats[rank] == self._beats_before.get(rank)]
        if gone:
            why = f"{name_ranks(gone)} had ended already: the ranks did not do the same number of steps."
        elif silent:
            self._silent = silent
            with self._talk():
                who = "; ".join(describe_silent(rank, peer_info(self._store, rank)) for rank in silent[:8])
            why = f"No heartbeat from {name_ranks(silent)} ({who}): stopped, dead, or the machine is gone."
        elif busy:
            who = ", ".join(f"rank {rank} after {beats[rank][1]} updates" for rank in busy[:8])
            why = (
                f"{name_ranks(busy).capitalize()} did not join it ({who}): the process is alive and does something "
                "else. If it is only slow (reading data, writing a checkpoint), raise distributed.timeout_seconds."
            )
        else:
            why = "All ranks are alive, and all of them wait: check the network between them."
        what = "lost its connection to another rank"
        if _TIMEOUT.search(words(error)):
            what = f"waited {self.timeout_seconds:g} s (distributed.timeout_seconds) in a collective for another rank"
        return f"rank {self.launch.rank} {what}. {why}\ntorch reported: {words(error)}"

    def _beats(self) -> dict[int, tuple[int, int]]:
        """Of every rank: how often it has given a sign of life, and which update it is at."""
        beats = dict.fromkeys(range(self.launch.world_size), (0, 0))
        with self._talk():
            for rank in beats:
                if self._store.check([f"beat/{rank}"]):
                    beats[rank] = read_beat(rank, self._store.get(f"beat/{rank}"))
        return beats

    @contextlib.contextmanager
    def _talk(self) -> Iterator[None]:
        """The store belongs to one thread at a time; where it does not answer, this process ends."""
        if not self._lock.acquire(timeout=STORE_SECONDS):
            self.end_without_store()
        is_over = threading.Event()
        # A process that was stopped and continues finds all its time gone: what answers now has not been too slow.
        guard = threading.Timer(STORE_SECONDS, lambda: is_over.wait(CONTINUED_SECONDS) or self.end_without_store())
        guard.daemon, guard.name = True, STORE_GUARD
        guard.start()
        try:
            yield
        finally:
            is_over.set()
            guard.cancel()
            self._lock.release()

    def _first(self) -> Failure | None:
        with self._talk():
            if self._store.check(["failure"]):
                return Failure.read(self._store.get("failure"))
        return None

    # ------------------------------------------------------------------ the watching thread

    def _run(self) -> None:
        neighbor = WatchedPeer((self.launch.rank + 1) % self.launch.world_size)
        count = 0
        while not self._stopping.wait(BEAT_SECONDS):
            if self.leaving is not None:
                deadline, exit_code = self.leaving
                deadline.count(BEAT_SECONDS)
                if deadline.is_over:
                    end_process(exit_code)
                continue
            count += 1
            try:
                with self._talk():
                    self._store.set(f"beat/{self.launch.rank}", f"{count} {self.progress}")
                    death = neighbor.death(self._store)
                    self._recorder.answer(self._store, self.progress)
                self._end_if_failed(death)
            except dist.DistError:
                if not self._stopping.is_set() and self.leaving is None:
                    self.end_without_store()
            except ForeignEntryError as error:
                self.end_on_foreign_entry(error)

    def _end_if_failed(self, death: str | None) -> None:
        first = self._first()
        if first is None and death is not None:
            found = Failure(self.launch.rank, death, 1)
            first = self.publish(found)
            if first == found:
                leave_cause(Cause("death", death, self.progress))
                self._dead = 1  # it will not see why the others end
                if LAUNCHED_BY_US not in os.environ:
                    notify(death)
                self.let_end(found.exit_code)
        # This rank's own failure its main thread is about to show.
        if first is not None and first.rank != self.launch.rank:
            self.end_after_showing(first.exit_code)

    def end_on_foreign_entry(self, error: ForeignEntryError) -> NoReturn:
        """A stranger writes into the store: every rank finds it, and one of every machine shows it, once."""
        self._ending.acquire()
        if self.launch.local_rank == 0:
            notify(str(error))
        end_process(exit_code_of(error))

    def end_without_store(self) -> NoReturn:
        """Nobody can agree any more on who speaks: rank 1, and one process of every other machine."""
        if self.launch.rank == 1 or self.launch.local_rank == 0:
            owner = "torchrun" if self.launch.agent_store else "rank 0"
            if LAUNCHED_BY_US in os.environ:
                owner = "onward train, which started the processes,"
            place = f"{self.launch.master_address}:{self.launch.master_port}"
            notify(
                f"rank {self.launch.rank} of {self.launch.world_size} on {socket.gethostname()}: {owner} is gone "
                f"({place} does not answer any more): it was killed, or its machine is unreachable. Its own output may "
                "say more."
            )
        end_process(1)
