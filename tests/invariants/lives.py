"""Lives: `onward train` in processes that are forked with torch imported already, so that one starts within a second.

A launched life is onward's own launcher, which forks its workers instead of starting Python for each; a life on its own
is ranks that find each other as under srun, where nobody looks after them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NoReturn

from onward import runner
from onward.cli import main
from onward.operating_system import is_running
from onward.parallel.launch import launching
from onward.parallel.rendezvous.launcher import LAUNCHED_BY_US
from tests.parallel.starting import free_port
from tests.ranks import _CONTEXT

Who = Literal["launcher", "a rank", "all"]


@dataclass(frozen=True)
class KillInExport:
    """Who dies with SIGKILL so many seconds after a rank has begun to write the trained model.

    Attributes:
        who: the launcher, the rank `rank`, or all processes of the life.
        rank: that is killed, if it is one.
        seconds: since the beginning of the export in that process.
        mark: name of a file that is there as soon as it happens.
    """

    who: Who
    rank: int
    seconds: float
    mark: str


class Life:
    """The processes of one start of a command.

    Args:
        folder: where they run, with `run.yaml`.
        output: name of the folder for what they write.
        ranks: how many.
        is_launched: by onward's launcher; else as srun does.
        options: further arguments of `onward train`.
        before: called in every process first, with its rank (-1: the launcher); for faults. Must be importable.
        arguments: for `before`, after the rank.
    """

    def __init__(
        self,
        folder: Path,
        output: str,
        ranks: int,
        is_launched: bool,
        options: Sequence[str] = (),
        before: Callable[..., None] | None = None,
        arguments: Sequence[Any] = (),
    ) -> None:
        self.folder, self.output, self.is_launched = folder, output, is_launched
        self._pids = folder / f"{output}.pids"
        self._pids.write_text("")
        start = _Start(str(folder), output, tuple(options), before, tuple(arguments))
        count, port = 1 if is_launched else ranks, free_port()
        self.processes: list[BaseProcess] = []
        for rank in range(count):
            variables = {} if is_launched or ranks == 1 else _as_srun_does(rank, ranks, port)
            process = _CONTEXT.Process(target=_live, args=(start, is_launched, variables), daemon=True)
            process.start()
            self.processes.append(process)

    @property
    def launcher(self) -> int | None:
        """Its process number."""
        return self.processes[0].pid if self.is_launched else None

    @property
    def is_over(self) -> bool:
        """Whether the launcher, or one of the ranks on their own, has ended."""
        return any(process.exitcode is not None for process in self.processes)

    def exit_codes(self) -> list[int | None]:
        """Of the launcher, or of the ranks on their own."""
        return [process.exitcode for process in self.processes]

    def ranks(self) -> dict[int, int]:
        """Process numbers of the ranks that are alive; after a restart, of the new ones."""
        if not self.is_launched:
            return {rank: one.pid or 0 for rank, one in enumerate(self.processes) if one.exitcode is None}
        newest = dict(self._launched())
        return {rank: pid for rank, pid in newest.items() if is_running(pid)}

    def alive(self) -> set[int]:
        """Numbers of all processes of this life that have not ended."""
        known = {process.pid or 0 for process in self.processes if process.exitcode is None}
        return known | {pid for _, pid in self._launched() if is_running(pid)}

    def kill(self, who: Who, rank: int = 0) -> bool:
        """SIGKILL to the launcher, a rank or all processes; whether there was one left to kill."""
        ranks = self.ranks()
        launcher = [self.launcher] if self.launcher is not None and self.processes[0].exitcode is None else []
        chosen = {"launcher": launcher, "a rank": [ranks[rank]] if rank in ranks else []}
        pids = chosen.get(who, [*launcher, *ranks.values()])
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(pids)

    def kill_in_export(self, order: KillInExport) -> None:
        """Whoever exports from now on obeys, once."""
        file = self.folder / f"{self.output}.export"
        file.with_suffix(".new").write_text(json.dumps(asdict(order)))
        file.with_suffix(".new").rename(file)

    def log(self) -> str:
        """What all processes have printed, in all lives with the same output."""
        return (self.folder / f"{self.output}.log").read_text(errors="replace")

    def end(self) -> None:
        """Ends whatever is left."""
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.join(10)

    def _launched(self) -> list[tuple[int, int]]:
        lines = self._pids.read_text().splitlines()
        return [(int(rank), int(pid)) for rank, pid in map(str.split, lines)]


def start_server() -> None:
    """Has the server ready that processes are forked from, so that it does not count as start-up."""
    process = _CONTEXT.Process(target=os.getpid)
    process.start()
    process.join()


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Waits until something is so; False: it was not in that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.002)
    return True


# ---------------------------------------------------------------------- in the processes of a life


@dataclass(frozen=True)
class _Start:
    folder: str
    output: str
    options: tuple[str, ...]
    before: Callable[..., None] | None
    arguments: tuple[Any, ...]


def _as_srun_does(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def _live(start: _Start, is_launcher: bool, variables: Mapping[str, str]) -> NoReturn:
    os.setsid()
    os.chdir(start.folder)
    log = os.open(f"{start.output}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", **variables}
    into = [f"--paths.output_dir={start.output}", f"--checkpoint.checkpoints_dir={start.output}/checkpoints"]
    command = ["train", "run.yaml", *into, *start.options]
    if is_launcher:
        popen = lambda arguments, env, start_new_session: _ForkedWorker(start, arguments, env)  # noqa: E731
        launching.subprocess = SimpleNamespace(Popen=popen)  # type: ignore[assignment, attr-defined]
        _run(start, -1, command)
    _run(start, int(variables.get("RANK", "0")), command)


def _run(start: _Start, rank: int, command: Sequence[str]) -> NoReturn:
    exit_code = 1
    try:
        if start.before is not None:
            start.before(rank, *start.arguments)
        if rank >= 0:
            _watch_export(start.output, rank)
        exit_code = main(command)
    except SystemExit as end:
        exit_code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


class _ForkedWorker:
    """A worker as the launcher sees it, forked from the launcher, with what it would have after a new start of Python:
    its own session and environment, no file of the launcher, no handlers of signals."""

    def __init__(self, start: _Start, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._exit_code: int | None = None
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            nowhere = os.open(os.devnull, os.O_RDWR)
            for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:
                if descriptor > 2:  # closed, but for its number, which an object of the launcher may close again
                    with contextlib.suppress(OSError):
                        os.dup2(nowhere, descriptor)
            for number in signal.valid_signals():
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            os.environ.clear()
            os.environ.update(environment)
            _run(start, int(environment["RANK"]), arguments[arguments.index("train") :])
        with open(f"{start.output}.pids", "a") as file:
            file.write(f"{environment['RANK']} {self.pid}\n")

    def poll(self) -> int | None:
        if self._exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._exit_code = os.waitstatus_to_exitcode(status)
        return self._exit_code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


_FILE_OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.scandir"}
_SLOW_DISK_SECONDS = 0.01
"""That each of them takes while the trained model is written, which so small a model is in 5 ms by itself."""


def _watch_export(output: str, rank: int) -> None:
    """Writes down how long the trained model took to write, and kills whom an order says on the way."""
    export = runner.export_run  # type: ignore[attr-defined]
    is_exporting = False

    def slow_down(event: str, arguments: object) -> None:
        if is_exporting and event in _FILE_OPERATIONS:
            time.sleep(_SLOW_DISK_SECONDS)

    def watched_export(*arguments: Any) -> Any:
        nonlocal is_exporting
        with contextlib.suppress(FileNotFoundError):
            _obey(KillInExport(**json.loads(Path(f"{output}.export").read_text())), rank)
        started, is_exporting = time.perf_counter(), True
        written = export(*arguments)
        is_exporting = False
        if rank == 0:
            Path(f"{output}.exported").write_text(str(time.perf_counter() - started))
        return written

    sys.addaudithook(slow_down)

    runner.export_run = watched_export  # type: ignore[assignment, attr-defined]


def _obey(order: KillInExport, rank: int) -> None:
    concerns = {"launcher": rank == 0, "a rank": rank == order.rank, "all": True}[order.who]
    if not concerns or Path(order.mark).exists():
        return

    def kill() -> None:
        Path(order.mark).touch()
        if order.who != "a rank" and LAUNCHED_BY_US in os.environ:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(os.environ[LAUNCHED_BY_US]), signal.SIGKILL)
        if order.who != "launcher":
            os.kill(os.getpid(), signal.SIGKILL)

    timer = threading.Timer(order.seconds, kill)
    timer.daemon = True
    timer.start()
