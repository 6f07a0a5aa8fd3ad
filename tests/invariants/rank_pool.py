"""Ranks that stay alive between runs: what torch does once in a process takes longer than a small run.

Every call has process groups of its own; a rank that fails ends the pool, and the next call starts another.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from tests.ranks import _CONTEXT, LONGEST_SECONDS, _receive

_pool: _RankPool | None = None


def call_on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """As `tests.ranks.run_on_ranks`, on ranks that earlier calls of the same size have warmed up."""
    global _pool
    if _pool is None or _pool.world_size != world_size:
        end_ranks()
        _pool = _RankPool(world_size)
    try:
        return _pool.call(function, *arguments)
    except BaseException:
        end_ranks()
        raise


def end_ranks() -> None:
    """Ends the ranks that are alive."""
    global _pool
    if _pool is not None:
        _pool.end()
    _pool = None


class _RankPool:
    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(rank, world_size, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            for pipe in self._pipes:
                pipe.send((str(Path(folder) / "store"), function, arguments))
            results = dict[int, Any]()
            while len(results) < self.world_size:  # the first to fail leaves the others waiting for it
                waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in results}
                ready = [waiting[pipe] for pipe in wait(list(waiting), LONGEST_SECONDS)]  # type: ignore[index]
                for rank in ready or waiting.values():
                    results[rank] = _receive(rank, self._pipes[rank])
            for pipe in self._pipes:
                assert pipe.recv() == "left"
            return [results[rank] for rank in range(self.world_size)]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank: int, world_size: int, pipe: Any) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    torch.set_num_threads(1)
    while True:
        store, function, arguments = pipe.recv()
        dist.init_process_group("gloo", store=FileStore(store, world_size), rank=rank, world_size=world_size)
        try:
            answer = (True, function(*arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))
        dist.barrier()
        dist.destroy_process_group()
        pipe.send("left")
