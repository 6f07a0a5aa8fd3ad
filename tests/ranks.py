"""Runs a function on several Gloo ranks, each a process forked from a server that has trained with torch already."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.fork_server"])
LONGEST_SECONDS = 300.0


def run_on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Calls `function(*arguments)` on every rank inside of an initialized Gloo group; results in the order of ranks.

    The function must be importable (defined at the top of a test module); arguments and results are pickled.
    The first failing rank's traceback becomes an AssertionError; the other processes are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            store = str(Path(folder) / "store")
            process = _CONTEXT.Process(
                target=_run, args=(rank, world_size, store, theirs, function, arguments), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return [_receive(rank, pipe) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _receive(rank: int, pipe: Connection) -> Any:
    if not pipe.poll(LONGEST_SECONDS):
        raise AssertionError(f"rank {rank} gave no result within {LONGEST_SECONDS:.0f} s")
    try:
        fine, result = pickle.loads(pipe.recv_bytes())
    except EOFError:
        raise AssertionError(f"rank {rank} ended without a result") from None
    if not fine:
        raise AssertionError(f"rank {rank} failed:\n{result}")
    return result


def _run(
    rank: int, world_size: int, store: str, pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(store, world_size), rank=rank, world_size=world_size)
    try:
        answer = (True, function(*arguments))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))  # torch's own way would leave tensors in memory of a process that ends
    if answer[0]:
        with contextlib.suppress(RuntimeError):  # the test has all results, and ends the ranks
            dist.barrier()
    dist.destroy_process_group()
