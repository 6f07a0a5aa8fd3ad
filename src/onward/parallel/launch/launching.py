"""`onward train` started plainly on one machine: launches its own workers, which rendezvous over loopback alone.

It forwards signals to them, tells how a killed one ended, and ends with the exit code of the first that failed. torch's
elastic launcher does the same, but listens on all interfaces and unpickles what its store holds.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from onward import operating_system
from onward.deadline import Deadline
from onward.errors import ParametersError
from onward.operating_system import out_of_memory_kills, usable_cores
from onward.parallel.launch.process import DeviceKind, choose_backend
from onward.parallel.launch.restarting import INTERRUPTED, LaunchEnd
from onward.parallel.rendezvous.launcher import LAUNCHED_BY_US, LOOPBACK
from onward.parallel.rendezvous.listening import listen, serve_store, stay_on_loopback
from onward.parallel.rendezvous.run_store import SECRET, SHORTEST_SECRET
from onward.parallel.watch.cause import CAUSE_FILE, Cause, read_cause
from onward.parallel.watch.heartbeats import STORE_SECONDS
from onward.parameters.distributed import Distributed

END_SECONDS = 25.0
"""After a failure the other workers end by themselves; one that does not by then hangs, and is killed."""
POLL_SECONDS = 0.05
"""How often this process looks whether a worker has ended."""


def worker_count(distributed: Distributed) -> int:
    """How many processes the sizes ask for."""
    return distributed.world_size


def check_room(distributed: Distributed, device_kind: DeviceKind) -> None:
    """Whether this machine can run all the processes.

    Raises:
        ParametersError: this is not Linux, there are not enough GPUs, or NCCL is demanded on CPUs.
    """
    choose_backend(distributed.use_nccl, device_kind)
    count, gpus = worker_count(distributed), torch.cuda.device_count()
    if count > 1 and not operating_system.is_linux():
        raise ParametersError(
            f"distributed: {distributed.product} = {count} processes, which onward starts on Linux only; this is "
            f"{sys.platform}. Set these sizes to 1."
        )
    if device_kind == "cuda" and count > gpus:
        raise ParametersError(
            f"distributed: {distributed.product} = {count} processes, each with its own GPU, but this machine has "
            f"{gpus}. Make the product at most {gpus}, start on several machines (torchrun, mpirun or srun), or set "
            "machine.execution_provider to CPU."
        )


def launch_workers(count: int, arguments: Sequence[str]) -> int:
    """`launch`, for its exit code alone."""
    return launch(count, arguments).exit_code


def launch(count: int, arguments: Sequence[str], more: Mapping[str, str] | None = None) -> LaunchEnd:
    """Runs `python ARGUMENTS` in `count` processes and waits for them; returns how they ended.

    The processes rendezvous at a store that this process holds, on the loopback interface. SIGINT and SIGTERM are
    forwarded to the workers, which save and end. Must be called in the main thread.

    Args:
        count: of processes.
        arguments: of Python.
        more: environment variables for all of them.
    """
    workers: list[subprocess.Popen[bytes]] = []
    memory_kills = out_of_memory_kills()
    with tempfile.TemporaryDirectory(prefix="onward_") as folder:
        file = Path(folder) / "cause.json"
        with _forwarded_signals(workers) as asked, listen(LOOPBACK) as listener:
            port = listener.getsockname()[1]
            store = serve_store(listener, STORE_SECONDS)
            secret = os.environ.get(SECRET) or secrets.token_hex(SHORTEST_SECRET)
            added = {**(more or {}), CAUSE_FILE: str(file), SECRET: secret}
            ended = _run(workers, [_worker_environment(rank, count, port) | added for rank in range(count)], arguments)
            del store  # it served until the last worker had ended
        if not any(one.exit_code for one in ended):
            return LaunchEnd(0)
        exit_code, killed = _explain(ended, count, out_of_memory_kills() > memory_kills)
        return LaunchEnd(exit_code, killed or read_cause(file), bool(asked) or _was_asked(ended))


def _first_failure(ended: Iterable[EndedWorker]) -> EndedWorker | None:
    """That was seen first, whatever caused it."""
    return min((one for one in ended if one.exit_code), key=lambda one: one.seen_at_seconds, default=None)


def _was_asked(ended: Sequence[EndedWorker]) -> bool:
    """Whether somebody ended a worker by SIGTERM; this process does so when one has failed, and then to others."""
    first = _first_failure(ended)
    return first is not None and first.exit_code == -signal.SIGTERM


def _worker_environment(rank: int, count: int, port: int) -> dict[str, str]:
    """What torchrun would set, and that everything this worker opens stays on the loopback interface."""
    variables = {
        **os.environ,
        LAUNCHED_BY_US: str(os.getpid()),
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"onward.{os.getpid()}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    # Every process would take all cores.
    variables.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // count)))
    # After a timeout NCCL's communicators are torn down and the process ends, as under torchrun.
    variables.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    stay_on_loopback(variables)
    return variables


@dataclass(frozen=True)
class EndedWorker:
    """How a worker ended: the rank and process it was, its exit code (below 0: a signal), and when that was seen."""

    rank: int
    pid: int
    exit_code: int
    seen_at_seconds: float


def _run(
    workers: list[subprocess.Popen[bytes]], environments: Sequence[Mapping[str, str]], arguments: Sequence[str]
) -> list[EndedWorker]:
    """Starts a worker in each environment and waits until all have ended; the first failure ends the others, too."""
    ended: dict[int, EndedWorker] = {}
    try:
        for environment in environments:
            command = [sys.executable, *arguments]
            # A session of its own: Ctrl-C reaches a worker once, through this process.
            workers.append(subprocess.Popen(command, env=environment, start_new_session=True))
        grace = Deadline(END_SECONDS)
        while len(ended) < len(workers):
            grace.pause(POLL_SECONDS)
            had_failed = _first_failure(ended.values()) is not None
            for rank, worker in enumerate(workers):
                exit_code = worker.poll()
                if rank not in ended and exit_code is not None:
                    ended[rank] = EndedWorker(rank, worker.pid, exit_code, time.monotonic())
            first = _first_failure(ended.values())
            if first is not None and not had_failed:
                grace = Deadline(END_SECONDS)
                _signal_all(workers, signal.SIGTERM)
            if first is not None and first.exit_code != INTERRUPTED and grace.is_over:
                _signal_all(workers, signal.SIGKILL)
    except BaseException:
        _signal_all(workers, signal.SIGKILL)
        raise
    return list(ended.values())


def _signal_all(workers: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for worker in workers:
        worker.send_signal(number)  # nothing happens to one that has ended


def _explain(ended: Sequence[EndedWorker], count: int, is_memory: bool = False) -> tuple[int, Cause | None]:
    """The exit code of the first failure; of a killed worker the cause, in the words that it could not say itself."""
    first = _first_failure(ended)
    assert first is not None
    for other in (one for one in ended if one.exit_code):
        # Workers that notice the end of a killed one may be seen to end before it.
        is_at_once = other.seen_at_seconds <= first.seen_at_seconds + 1
        if is_at_once and other.exit_code < 0 and other.exit_code != -signal.SIGTERM:
            first = other
    if first.exit_code >= 0:
        return first.exit_code, None
    name = signal.Signals(-first.exit_code).name
    hint = " The kernel does so when memory runs out; look at dmesg." if name == "SIGKILL" else ""
    if name == "SIGKILL" and is_memory:
        hint = " The kernel has killed a process for lack of memory in the meantime."
    text = f"rank {first.rank} of {count} (process {first.pid}) was ended by {name}; all ranks end.{hint}"
    sys.stderr.write(f"onward train: {text}\n")
    return 1, Cause("out of memory" if name == "SIGKILL" and is_memory else "death", text)


@contextmanager
def _forwarded_signals(workers: Sequence[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """SIGINT and SIGTERM go to the workers; where there are none yet, they end this process as usual.

    SIGUSR1, which asks to save, goes to them, too. A closed terminal (SIGHUP) asks them to save and end. Gives the
    signals that asked for an end.
    """
    asked: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if not any(worker.poll() is None for worker in workers):
            raise KeyboardInterrupt
        _signal_all(workers, signal.SIGTERM if number == signal.SIGHUP else number)

    def forward_save(number: int, frame: FrameType | None) -> None:
        _signal_all(workers, number)

    handlers = {signal.SIGINT: forward, signal.SIGTERM: forward, signal.SIGUSR1: forward_save}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        handlers[signal.SIGHUP] = forward
    previous = {one: signal.signal(one, handler) for one, handler in handlers.items()}
    try:
        yield asked
    finally:
        for one, handler in previous.items():
            signal.signal(one, handler)
