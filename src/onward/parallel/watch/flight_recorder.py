"""A flight recorder for hangs: every rank's stacks, last collectives and updates, in one file of the run folder.

torch records the collectives; each rank's watch thread answers for it, and C code for a rank that holds Python's lock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch._C._distributed_c10d as c10d

from onward.deadline import Deadline
from onward.operating_system import open_file_of, process_state, stack_signal
from onward.parallel.rendezvous.rendezvous import PeerInfo, peer_info
from onward.parallel.rendezvous.run_store import RunStore

KEPT_COLLECTIVES = 256
"""How many of a rank's last collectives torch remembers, unless TORCH_FR_BUFFER_SIZE says otherwise."""
SHOWN_COLLECTIVES = 5
STORE_GUARD = "onward store guard"
"""Name of threads that only look at the clock while another one talks to the store."""
ANSWER_SECONDS = 4.0
"""How long every rank has to write down where it is."""
SIGNAL_SECONDS = 1.0
"""How long C code may take to write the stacks of a rank that did not answer."""


def record_collectives(folder: Path | None) -> None:
    """Has torch remember collectives; must be called before the first process group is made.

    Args:
        folder: where torch itself writes what it knows of NCCL when a collective times out (`nccl_trace_rank_0`, ...).
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(KEPT_COLLECTIVES))
    if folder is not None:
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder.absolute() / "nccl_trace_rank_"))


@dataclass(kw_only=True)
class FlightRecorder:
    """What one rank tells of itself, and how the rank that found a hang collects it.

    Attributes:
        rank, world_size: this rank, and how many there are.
        folder: of the file; None: the folder for temporary files.
        left_by: the exception with which the main thread came out of a collective, with its traceback.
    """

    rank: int
    world_size: int
    folder: Path | None = None
    left_by: str | None = None
    _is_answered: bool = False
    _stacks: io.FileIO | None = field(default=None, init=False)

    def begin(self, store: RunStore) -> None:
        """From now on other ranks can ask where this one is."""
        number = stack_signal()
        if number is None:
            return
        # A file in memory, which others of this machine read through /proc and which ends with this process.
        self._stacks = io.FileIO(os.memfd_create("onward stacks"), "r+")
        faulthandler.register(number, self._stacks, all_threads=True, chain=False)
        store.set(f"flight/file/{self.rank}", str(self._stacks.fileno()))

    def end(self) -> None:
        """Nobody asks any more."""
        number, stacks = stack_signal(), self._stacks
        if number is not None and stacks is not None:
            signal.signal(number, signal.SIG_IGN)  # before C code lets go of it: a late one must not end the process
            faulthandler.unregister(number)
            stacks.close()
            self._stacks = None

    def note(self, error: BaseException) -> None:
        """The main thread has left a collective with an exception: where it was, its stack does not tell any more."""
        self.left_by = "".join(traceback.format_exception(error))

    def answer(self, store: RunStore, updates: int) -> None:
        """Writes into the store where this rank is, if another rank has asked; called in the watch thread."""
        if not self._is_answered and store.check(["flight/asked"]):
            self._is_answered = True
            found = {"updates": updates, "collectives": last_collectives(), "stacks": self._describe_stacks()}
            store.set(f"flight/answer/{self.rank}", json.dumps(found))

    def collect(self, talk: Callable[[], AbstractContextManager[None]], store: RunStore, cause: str) -> Path | None:
        """Asks all ranks, and writes the file; None: another rank does, or the file cannot be written.

        Args:
            talk: makes the store this thread's own.
            store: of the run.
            cause: what has failed, as far as it is known.
        """
        with talk():
            if store.compare_set("flight/asked", "", str(self.rank)).decode() != str(self.rank):
                return None
        answers: dict[int, dict[str, Any]] = {}
        deadline = Deadline(ANSWER_SECONDS)
        while len(answers) < self.world_size and not deadline.is_over:
            deadline.pause(0.1)
            with talk():
                for rank in set(range(self.world_size)) - set(answers):
                    if store.check([f"flight/answer/{rank}"]):
                        answers[rank] = json.loads(store.get(f"flight/answer/{rank}"))
        with talk():
            silent = {rank: _stacks_of_silent(store, rank) for rank in range(self.world_size) if rank not in answers}
            people = {rank: peer_info(store, rank) for rank in range(self.world_size)}
        return _write(self.folder, _compose(cause, people, answers, silent))

    def _describe_stacks(self) -> str:
        lines = []
        if self.left_by is not None:
            lines += ["main thread, which left its collective with an exception:", self.left_by.rstrip()]
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        hidden = {threading.get_ident(), *([threading.main_thread().ident] if self.left_by is not None else [])}
        frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != threading.main_thread().ident)
        for number, frame in frames:
            if number not in hidden and names.get(number) != STORE_GUARD:
                lines += [f"thread {names.get(number, number)}:", "".join(traceback.format_stack(frame)).rstrip()]
        return "\n".join(lines)


def last_collectives() -> list[str]:
    """The last collectives of this process in words, the newest last."""
    dump = getattr(c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return ["not recorded by this version of torch"]
    try:
        entries = json.loads(dump(True, False)).get("entries", [])
    except (RuntimeError, ValueError) as error:
        return [f"not recorded: {error}"]
    return [_describe_collective(entry) for entry in entries[-SHOWN_COLLECTIVES:]]


def _describe_collective(entry: Mapping[str, Any]) -> str:
    number = entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id")
    group = entry.get("process_group") or ["?", ""]
    sizes = ", ".join(
        f"{dtype}{size}"
        for dtype, size in zip(entry.get("input_dtypes", []), entry.get("input_sizes", []), strict=False)
    )
    seconds = time.time() - float(entry.get("time_created_ns", 0)) / 1e9
    is_over = entry.get("retired") or entry.get("state") == "completed"
    how = "over" if is_over else "NOT OVER"  # one that timed out is over, too: nobody waits for it any more
    return (
        f"{entry.get('profiling_name')} number {number} of group {group[0]} ({group[1]})"
        f"{f' on {sizes}' if sizes else ''}: {how}, begun {seconds:.1f} s ago"
    )


def _stacks_of_silent(store: RunStore, rank: int) -> str:
    """What can be found out about a rank that does not answer: it is stopped, gone, or holds Python's lock."""
    who = peer_info(store, rank)
    if not who.is_near():
        return f"no answer, and it runs on another machine than the rank that asked; look at {who}"
    state = process_state(who.pid)
    number = stack_signal()
    if state is None or number is None or not store.check([f"flight/file/{rank}"]):
        return f"no answer; process {who.pid} {state or 'is gone'}"
    place = open_file_of(who.pid, int(store.get(f"flight/file/{rank}")))
    found = ""
    with contextlib.suppress(OSError):
        os.kill(who.pid, number)
        deadline = Deadline(SIGNAL_SECONDS)
        while not found and not deadline.is_over:
            deadline.pause(0.1)
            found = place.read_text(errors="replace")
    told = "its stacks, which C code wrote:\n" + found.rstrip() if found else "C code wrote no stacks either"
    return f"no answer; process {who.pid} {state}; {told}"


def _compose(
    cause: str, people: Mapping[int, PeerInfo], answers: Mapping[int, Mapping[str, Any]], silent: Mapping[int, str]
) -> str:
    """The text of the file: a line for each rank, then each in full."""
    lines = [cause, "", f"Written {time.strftime('%Y-%m-%d %H:%M:%S')}. The ranks in short:", ""]
    for rank in people:
        if rank in answers:
            collectives: Sequence[str] = answers[rank]["collectives"]
            last = collectives[-1] if collectives else "no collective yet"
            lines.append(f"  rank {rank} after {answers[rank]['updates']} updates; last collective: {last}")
        else:
            lines.append(f"  rank {rank}: {silent[rank].splitlines()[0]}")
    for rank, who in people.items():
        lines += ["", f"{'=' * 20} rank {rank} ({who})"]
        if rank in answers:
            lines += [f"updates since its start: {answers[rank]['updates']}", "last collectives, the newest last:"]
            lines += [f"  {one}" for one in answers[rank]["collectives"]] + ["", answers[rank]["stacks"]]
        else:
            lines.append(silent[rank])
    return "\n".join(lines) + "\n"


def _write(folder: Path | None, text: str) -> Path | None:
    name = f"hang_{time.strftime('%Y-%m-%d_%H-%M-%S')}.txt"
    for place in (folder, Path(tempfile.gettempdir())):
        if place is not None:
            with contextlib.suppress(OSError):
                place.mkdir(parents=True, exist_ok=True)
                (place / name).write_text(text, encoding="utf-8")
                return place / name
    return None
