"""How `benchmarks.compare` talks to the processes it measures: a line in, a line of JSON out; no torch here.

Processes that take turns, a few steps each, see the same machine, however busy it is.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MARK = "@compare "
STARTED = "COMPARE_STARTED"


def cpu_seconds() -> float:
    """What this process and its finished children computed, all threads together."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def resident_bytes(field: str) -> int:
    """`VmRSS` (now) or `VmHWM` (the most since the last reset) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def reset_peak() -> None:
    """From now on `VmHWM` is of what comes."""
    Path("/proc/self/clear_refs").write_text("5")


def say(answer: Mapping[str, Any]) -> None:
    """One line to the comparing process; whatever else is printed here, it does not take for an answer."""
    print(MARK + json.dumps(answer), flush=True)


def serve(step: Callable[[int], float], memory: Callable[[Callable[[], float]], int], baseline: int) -> None:
    """Answers until told to end.

    Args:
        step: trains on a batch of this number; waits until it is done, and gives the loss.
        memory: calls a step and gives the most bytes of tensors that were alive at once.
        baseline: resident bytes of the process before it had a model.
    """
    done = 0
    for line in sys.stdin:
        verb, _, count = line.strip().partition(" ")
        if verb == "end":
            return
        if verb == "memory":
            grown = resident_bytes("VmHWM") - baseline  # before it is profiled, which takes memory itself
            tensors = memory(functools.partial(step, done))
            done += 1
            say({"tensor_bytes": tensors, "resident_bytes": grown})
            continue
        losses, walls, computed = [], [], []
        for _ in range(int(count)):
            wall, busy = time.perf_counter(), time.process_time()
            losses.append(step(done))
            walls.append(time.perf_counter() - wall)
            computed.append(time.process_time() - busy)
            done += 1
        since_start = time.time() - float(os.environ[STARTED])
        say({"losses": losses, "wall": walls, "cpu": computed, "since_start": since_start, "cpu_total": cpu_seconds()})


class Contestant:
    """A process that trains when it is told to.

    Args:
        name: what the table calls it.
        command: starts it.
        environment: in addition to this process's own.
        log: where what it prints goes.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.failure: str | None = None
        self.log = log
        self._errors = log.open("w")
        variables = {**os.environ, **environment, STARTED: str(time.time())}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True, env=variables
        )

    def ask(self, line: str) -> dict[str, Any] | None:
        """The answer to a line; None after it has failed."""
        if self.failure is not None:
            return None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            for text in self._process.stdout:
                if text.startswith(MARK):
                    answer: dict[str, Any] = json.loads(text[len(MARK) :])
                    if "failure" in answer:
                        self.failure = answer["failure"]
                        return None
                    return answer
        except BrokenPipeError:
            pass
        lines = self.log.read_text().strip().splitlines()
        self.failure = lines[-1][:300] if lines else "ended without a word"
        return None

    def end(self) -> None:
        """Lets it go."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            try:
                self._process.stdin.write("end\n")
                self._process.stdin.close()
            except BrokenPipeError:
                pass
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._errors.close()
