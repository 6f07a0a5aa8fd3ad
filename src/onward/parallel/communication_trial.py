"""A trial of processes that communicate: all of them sum up the same tensor, check the sum and time it.

`python -m onward.parallel.communication_trial DEVICE SECONDS FILE` is one of them; `onward doctor` launches them.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from onward.errors import OnwardError
from onward.parallel.launch.process import DeviceKind, start, stop
from onward.parallel.rendezvous.launcher import detect
from onward.parallel.watch.failure import Membership, ending_together
from onward.parameters import Distributed

LARGE_BYTES = 32 * 2**20
SMALL_BYTES = 4


@dataclass(frozen=True)
class CommunicationSpeed:
    """What was measured.

    Attributes:
        processes: how many took part.
        backend: what carried the tensors.
        bytes_per_second: of the all-reduced tensor, each process's; the median of several.
        latency_seconds: of an all-reduce of 4 bytes; the median of several.
    """

    processes: int
    backend: str
    bytes_per_second: float
    latency_seconds: float


def measure(device_kind: DeviceKind, seconds: float, membership: Membership | None = None) -> CommunicationSpeed:
    """All-reduces a large and a small tensor over all processes; called by each of them.

    Raises:
        OnwardError: a sum is wrong.
    """
    mesh = start(Distributed(data_parallel_size=detect().world_size), device_kind, membership=membership)
    large = _median_seconds(mesh.rank, mesh.device, LARGE_BYTES, seconds / 2)
    small = _median_seconds(mesh.rank, mesh.device, SMALL_BYTES, seconds / 2)
    speed = CommunicationSpeed(mesh.world_size, dist.get_backend(mesh.data), LARGE_BYTES / large, small)
    stop(mesh)
    return speed


def _median_seconds(rank: int, device: torch.device, size_bytes: int, seconds: float) -> float:
    """The median time of an all-reduce; the same number of them on all ranks, since each waits for the others."""
    world_size = dist.get_world_size()
    expected = world_size * (world_size + 1) / 2
    times: list[float] = []
    count = torch.tensor(3.0, device=device)
    while len(times) < int(count):
        tensor = torch.full((size_bytes // 4,), float(rank + 1), device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
        if float(tensor.min()) != expected or float(tensor.max()) != expected:
            raise OnwardError(f"an all-reduce of {size_bytes} bytes over {world_size} processes gave a wrong sum.")
        if len(times) == 3:
            # The slowest rank decides how many more fit.
            count = torch.tensor(min(200.0, seconds / max(*times, 1e-9)), device=device)
            dist.all_reduce(count, dist.ReduceOp.MIN)
    return sorted(times)[len(times) // 2]


def main(arguments: list[str]) -> None:
    """One process of the trial; rank 0 writes what was measured."""
    device_kind: DeviceKind = "cuda" if arguments[0] == "cuda" else "cpu"
    rank = detect().rank
    with ending_together("onward doctor") as membership:
        speed = measure(device_kind, float(arguments[1]), membership)
    if rank == 0:
        Path(arguments[2]).write_text(json.dumps(asdict(speed)))


if __name__ == "__main__":
    main(sys.argv[1:])
