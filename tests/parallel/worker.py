"""A process of a run, for tests of launchers and failures: meets the others, adds numbers up, and fails as told."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from onward.engine.interruption import StopRequest
from onward.errors import DataError, Interrupted
from onward.parallel.agreement import UpdateAgreement, check_same
from onward.parallel.launch.process import Mesh, start, stop
from onward.parallel.rendezvous.launcher import detect
from onward.parallel.watch.failure import Membership, ending_together
from onward.parameters.distributed import Distributed


def run(what: str, parameters: Distributed, membership: Membership) -> None:
    """Starts, does what the test asks for on the rank it asks for, and ends."""
    if what == "fail-before" and detect().rank == 1:
        raise DataError("the shard lies.")
    if what == "stay-away" and detect().rank == 1:
        time.sleep(600)
    mesh = start(parameters, "cpu", Path(), membership)
    if what == "kill-in-start-up":
        if mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)  # the others read a large model, and exchange nothing
    check_same(mesh, {"model": f"{mesh.rank if what == 'differ' else 0}" * 64, "parameters": "same"})
    with StopRequest() as stop_request:
        total = train(mesh, what, stop_request)
    sys.stdout.write(f"rank {mesh.rank} of {mesh.world_size} at {mesh.place} has {total:g}\n")
    stop(mesh)


def train(mesh: Mesh, what: str, stop_request: StopRequest) -> float:
    """Updates without a model; the sum that all ranks of the last one made."""
    stopping = UpdateAgreement(mesh)
    for update in range(5 if what in ("sum", "kill-once") else 10_000):
        total = torch.tensor([mesh.rank + 1.0])
        if mesh.rank == 1 and update == 3:
            misbehave(what)
        for group in (mesh.pipeline, mesh.data, mesh.horizontal):
            if group is not None:
                dist.all_reduce(total, group=group)
        if stopping.after_update(stop_request.signal_name is not None).stops:
            time.sleep(0.2 * mesh.rank)
            Path(f"saved_{mesh.rank}").write_text(str(update))
            raise Interrupted(f"stopped after update {update}.")
        if what == "wait" and update == 3:
            Path(f"ready_{mesh.rank}").write_text(str(os.getpid()))
        time.sleep(0.01)
    return total.item()


def misbehave(what: str) -> None:
    """On the second rank, after three updates."""
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "kill-once" and detect().restart == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hang":
        time.sleep(600)
    if what == "hang-in-c":
        ctypes.PyDLL(None).sleep(600)  # keeps Python's lock
    if what == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "fail":
        raise DataError("the shard lies.")
    if what == "crash":
        raise ZeroDivisionError("a bug")


if __name__ == "__main__":
    options = dict(one.split("=") for one in sys.argv[2:])
    with ending_together() as membership:
        sizes: dict[str, Any] = {name: float(v) if "timeout" in name else int(v) for name, v in options.items()}
        run(sys.argv[1], Distributed(**sizes), membership)
