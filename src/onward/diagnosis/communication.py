"""Whether processes of this machine rendezvous and communicate, and how fast."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from onward import operating_system
from onward.diagnosis.findings import Finding
from onward.operating_system import usable_cores
from onward.parallel.communication_trial import CommunicationSpeed
from onward.parallel.launch.launching import launch_workers
from onward.parallel.launch.process import DeviceKind


def check_communication(processes: int | None, seconds: float) -> Iterator[Finding]:
    """An all-reduce over processes that are launched as `onward train` launches its own.

    Args:
        processes: how many; None: one for each GPU, or two on a machine without several of them.
        seconds: of the all-reduce; starting the processes takes additional time.
    """
    gpus = torch.cuda.device_count()
    count = processes or (gpus if gpus > 1 else min(2, usable_cores()))
    kind: DeviceKind = "cuda" if gpus >= count else "cpu"
    if kind == "cuda":
        version = ".".join(str(number) for number in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
        yield Finding("communication", f"NCCL {version}")
    if count < 2 or not operating_system.is_linux():
        yield Finding("communication", "not tested: several processes need Linux and two cores or GPUs", "note")
        return
    speed = measure_communication(count, kind, seconds)
    if isinstance(speed, int):
        yield Finding(
            "communication",
            f"{count} processes on this machine's {kind} cannot communicate (exit code {speed}; see above)",
            "problem",
            "Check firewalls on the loopback interface, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; "
            "set NCCL_DEBUG=INFO for details.",
        )
        return
    yield Finding(
        "communication",
        f"all-reduce of 32 MiB over {speed.processes} processes ({kind}, {speed.backend}): "
        f"{speed.bytes_per_second / 1e9:.2f} GB/s; 4 bytes: {speed.latency_seconds * 1e6:.0f} us; sums correct",
    )


def measure_communication(count: int, kind: DeviceKind, seconds: float) -> CommunicationSpeed | int:
    """The speed of an all-reduce over processes of this machine, or the exit code with which they failed."""
    with tempfile.TemporaryDirectory(prefix="onward_doctor_") as folder:
        result = Path(folder) / "speed.json"
        code = launch_workers(count, ["-m", "onward.parallel.communication_trial", kind, str(seconds), str(result)])
        if code != 0 or not result.is_file():
            return code
        return CommunicationSpeed(**json.loads(result.read_text()))
