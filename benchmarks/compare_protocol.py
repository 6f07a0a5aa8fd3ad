"""How `benchmarks.compare` talks to the processes it measures: a line in, a line of JSON out; no torch here.

Processes that take turns, a few steps each, see the same machine, however busy it is.
"""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

MARK = "@compare "
STARTED = "COMPARE_STARTED"
ERROR = re.compile(r"[\w.]*(Error|Exception|Unsupported)\b")
"""How the line begins in which a traceback names what was raised."""


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


def profile_if_asked(options: Any, folder: Path, prefix: str) -> None:
    """Where there is a folder `profiles`, sessions of ONNX Runtime with these options write their own into it."""
    if (folder / "profiles").is_dir():
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / "profiles" / prefix)


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
        errors = [line for line in lines if ERROR.match(line)]  # advice may follow it
        self.failure = (errors or lines)[-1][:300] if lines else "ended without a word"
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


class ForkedContestant(Contestant):
    """A contestant that begins as a copy of this process, with all that is imported here; its threads are few.

    Args:
        name, environment, log: as of a `Contestant`.
        run: what the copy does; it is asked and answers through its standard input and output.
    """

    def __init__(self, name: str, run: Callable[[], None], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.failure = None
        self.log = log
        self._errors = log.open("w")
        self._process = _Fork(run, {**environment, STARTED: str(time.time())}, self._errors)  # type: ignore[assignment]

    def pin(self, core: int) -> None:
        """Lets its main thread run on this core alone; what it compiled before could use all."""
        if self.failure is None:
            os.sched_setaffinity(self._process.pid, {core})


class _Fork:
    """What a contestant needs of `subprocess.Popen`."""

    def __init__(self, run: Callable[[], None], environment: Mapping[str, str], errors: TextIO) -> None:
        (in_child, to_child), (from_child, out_child) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if not self.pid:
            self._be_the_child(run, environment, (in_child, out_child, errors.fileno()), (to_child, from_child))
        os.close(in_child)
        os.close(out_child)
        self.stdin, self.stdout = os.fdopen(to_child, "w"), os.fdopen(from_child)
        self._ended = False

    @staticmethod
    def _be_the_child(
        run: Callable[[], None], environment: Mapping[str, str], standard: Sequence[int], others: Sequence[int]
    ) -> None:
        status = 1
        try:
            for place, descriptor in enumerate(standard):
                os.dup2(descriptor, place)
            for descriptor in others:
                os.close(descriptor)
            sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
            os.environ.update(environment)
            run()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def poll(self) -> int | None:
        """Whether it ended, as `Popen.poll` tells."""
        if not self._ended:
            self._ended = os.waitpid(self.pid, os.WNOHANG)[0] != 0
        return 0 if self._ended else None

    def wait(self, timeout: float) -> None:
        """Waits for its end.

        Raises:
            TimeoutExpired: it has not ended.
        """
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a contestant", timeout)
            time.sleep(0.01)

    def kill(self) -> None:
        """Ends it."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._ended = True
