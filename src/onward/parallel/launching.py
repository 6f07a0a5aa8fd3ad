"""`onward train` started plainly on one machine: launches its own workers through torch's elastic launcher.

It forwards signals to them, tells how a killed one ended, and ends with the exit code of the first that failed.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from onward import operating_system
from onward.errors import ParametersError
from onward.operating_system import children_leading_sessions, usable_cores
from onward.parallel.process import DeviceKind, choose_backend
from onward.parallel.watch import LAUNCHED_BY_US
from onward.parameters.distributed import Distributed

SAVING_SECONDS = 24 * 3600
"""How long workers may take to save after a signal; the person who sent it can send another one."""


def worker_count(parameters: Distributed) -> int:
    """How many processes parameters ask for."""
    return parameters.data_parallel_size * parameters.horizontal_parallel_size * parameters.pipeline_parallel_size


def check_room(parameters: Distributed, device_kind: DeviceKind) -> None:
    """Whether this machine can run all the processes.

    Raises:
        ParametersError: this is not Linux, there are not enough GPUs, or NCCL is demanded on CPUs.
    """
    choose_backend(parameters.use_nccl, device_kind)
    count, gpus = worker_count(parameters), torch.cuda.device_count()
    if count > 1 and not operating_system.is_linux():
        raise ParametersError(
            f"distributed asks for {count} processes, which onward starts on Linux only; this is {sys.platform}. "
            "Set data_parallel_size, horizontal_parallel_size and pipeline_parallel_size to 1."
        )
    if device_kind == "cuda" and count > gpus:
        raise ParametersError(
            f"distributed: data_parallel_size {parameters.data_parallel_size} * horizontal_parallel_size "
            f"{parameters.horizontal_parallel_size} * pipeline_parallel_size {parameters.pipeline_parallel_size} = "
            f"{count} processes, each with a GPU of its own, but this machine has {gpus}. Make the product at most "
            f"{gpus}, start on several machines (torchrun, mpirun or srun), or set machine.execution_provider to CPU."
        )


def launch_workers(count: int, arguments: Sequence[str]) -> int:
    """Runs `python ARGUMENTS` in `count` processes and waits for them; returns the exit code of all.

    SIGINT and SIGTERM go on to the workers, which save and end. Must be called in the main thread.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ[LAUNCHED_BY_US] = "1"
    # Every process would take all cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // count)))
    with tempfile.TemporaryDirectory(prefix="onward_") as folder, _forwarded_signals():
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=str(uuid.uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle="SIGHUP",
            shutdown_timeout=SAVING_SECONDS,
        )
        try:
            elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as error:
            return _explain(error.failures, count)
    return 0


def _explain(failures: dict[int, ProcessFailure], count: int) -> int:
    """The exit code of the first failure, and of a killed worker the words that it could not say."""
    rank, first = min(failures.items(), key=lambda item: item[1].timestamp)
    for other, failure in failures.items():
        # Workers that notice the end of a killed one may be seen to end before it.
        is_at_once = failure.timestamp <= first.timestamp + 1
        if is_at_once and failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            rank, first = other, failure
    if first.exitcode >= 0:
        return first.exitcode
    name = signal.Signals(-first.exitcode).name
    hint = " The kernel does so when memory runs out; look at dmesg." if name == "SIGKILL" else ""
    sys.stderr.write(
        f"onward train: rank {rank} of {count} (process {first.pid}) was ended by {name}; all ranks end.{hint}\n"
    )
    return 1


@contextmanager
def _forwarded_signals() -> Iterator[None]:
    """SIGINT and SIGTERM go to the workers; where there are none yet, they end this process as usual.

    SIGUSR1, which asks to save, goes to them, too.
    """

    def forward(number: int, frame: FrameType | None) -> None:
        workers = list(children_leading_sessions())
        for pid in workers:
            os.kill(pid, number)
        if not workers:
            raise KeyboardInterrupt

    def forward_save(number: int, frame: FrameType | None) -> None:
        for pid in children_leading_sessions():
            os.kill(pid, number)

    previous = {one: signal.signal(one, forward) for one in (signal.SIGINT, signal.SIGTERM)}
    if hasattr(signal, "SIGUSR1"):
        previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, forward_save)
    try:
        yield
    finally:
        for one, handler in previous.items():
            signal.signal(one, handler)
