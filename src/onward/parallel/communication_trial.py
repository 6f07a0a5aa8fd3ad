"""A trial of processes that communicate: all of them sum up the same tensor, check the sum and time it; then they
gather and reduce-scatter one as large.

`python -m onward.parallel.communication_trial DEVICE SECONDS FILE` is one of them; `onward doctor` launches them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
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


@dataclass(frozen=True, kw_only=True)
class CommunicationSpeed:
    """What was measured.

    Attributes:
        processes: how many took part.
        backend: what carried the tensors.
        bytes_per_second: of the all-reduced tensor, each process's; the median of several.
        latency_seconds: of an all-reduce of 4 bytes; the median of several.
        gathered_bytes_per_second: of the tensor that an all-gather makes.
        scattered_bytes_per_second: of the tensor that a reduce-scatter sums up.
    """

    processes: int
    backend: str
    bytes_per_second: float
    latency_seconds: float
    gathered_bytes_per_second: float
    scattered_bytes_per_second: float


def measure(device_kind: DeviceKind, seconds: float, membership: Membership | None = None) -> CommunicationSpeed:
    """All-reduces a large and a small tensor over all processes, then gathers and scatters; called by each of them.

    Raises:
        OnwardError: a sum is wrong.
    """
    mesh = start(Distributed(data_parallel_size=detect().world_size), device_kind, membership=membership)
    device, size, each = mesh.device, mesh.world_size, seconds / 4
    elements = LARGE_BYTES // 4 // size
    share, full = (torch.zeros(elements * count, device=device) for count in (1, size))
    shares = list(full.chunk(size))
    speed = CommunicationSpeed(
        processes=size,
        backend=dist.get_backend(mesh.data),
        bytes_per_second=LARGE_BYTES / _reduce_seconds(mesh.rank, device, LARGE_BYTES, each),
        latency_seconds=_reduce_seconds(mesh.rank, device, SMALL_BYTES, each),
        gathered_bytes_per_second=full.nbytes / _median_seconds(lambda: dist.all_gather(shares, share), device, each),
        scattered_bytes_per_second=full.nbytes
        / _median_seconds(lambda: dist.reduce_scatter(share, shares), device, each),
    )
    stop(mesh)
    return speed


def _reduce_seconds(rank: int, device: torch.device, size_bytes: int, seconds: float) -> float:
    """The median time of an all-reduce, whose sum is checked."""
    world_size = dist.get_world_size()
    expected = world_size * (world_size + 1) / 2
    tensor = torch.empty(size_bytes // 4, device=device)

    def check() -> None:
        if float(tensor.min()) != expected or float(tensor.max()) != expected:
            raise OnwardError(f"an all-reduce of {size_bytes} bytes over {world_size} processes gave a wrong sum.")

    return _median_seconds(
        lambda: dist.all_reduce(tensor), device, seconds, lambda: tensor.fill_(float(rank + 1)), check
    )


def _median_seconds(
    collective: Callable[[], object],
    device: torch.device,
    seconds: float,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> float:
    """The median time of a collective; the same number of them on all ranks, since each waits for the others."""
    times: list[float] = []
    count = torch.tensor(3.0, device=device)
    while len(times) < int(count):
        before()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        collective()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
        after()
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
