"""How fast this machine multiplies matrices: the rate that throughput is compared with, and its units."""

from __future__ import annotations

import time

import torch

from onward.operating_system import usable_cores

MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
MATMUL_SECONDS = 0.5

_UNITS = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"))


_MOST_MATMULS = 1000


def format_operations(count: float) -> str:
    """A count of floating-point operations in the largest unit that it has one of, at least kFLOP."""
    size, unit = next(((size, unit) for size, unit in _UNITS if count >= size), _UNITS[-1])
    return f"{count / size:,.1f} {unit}"


def matmul_rate(device: torch.device, dtype: torch.dtype, seconds: float = MATMUL_SECONDS) -> float:
    """Floating-point operations a second of a large matmul: the best of those within some seconds.

    The best, since whatever else the machine does can only make a matmul slower. A busy CPU interrupts each of them:
    there, the time that all threads computed counts, divided among them, where it is less than the clock's.
    """
    size = MATMUL_SIZE[device.type]
    own = torch.Generator(device).manual_seed(0)  # the run's random numbers stay as they are
    a = torch.randn(size, size, device=device, generator=own).to(dtype)
    b = torch.randn(size, size, device=device, generator=own).to(dtype)
    a @ b
    _wait(device)
    count = 8 if device.type == "cuda" else 1  # at once, so that starting them costs nothing
    threads = min(torch.get_num_threads(), usable_cores())
    best, ends = float("inf"), time.perf_counter() + seconds
    for _ in range(_MOST_MATMULS):  # also by a clock that has stopped
        if time.perf_counter() >= ends:
            break
        started, computed = time.perf_counter(), time.process_time()
        for _ in range(count):
            a @ b
        _wait(device)
        taken = time.perf_counter() - started
        if device.type == "cpu":
            taken = min(taken, (time.process_time() - computed) / threads)
        best = min(best, taken)
    return 2 * size**3 * count / max(best, 1e-9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
