"""`onward plan --calibrate`: the rates of this machine, measured and kept for the search of layouts."""

from __future__ import annotations

import math

import torch

from onward.diagnosis.communication import measure_communication
from onward.engine.forecast.hardware_here import keep_rates, rates_of
from onward.errors import OnwardError
from onward.operating_system import usable_cores
from onward.parallel.launch.process import DeviceKind
from onward.plan.search.hardware import Link
from onward.report.phases import Phases
from onward.tables import aligned

SECONDS = 1.0


def calibrate(phases: Phases) -> str:
    """Measures one device and communication between all of them; returns what to print.

    Raises:
        OnwardError: processes of this machine cannot communicate.
        StorageError: the rates cannot be written.
    """
    gpus = torch.cuda.device_count()
    kind: DeviceKind = "cuda" if gpus else "cpu"
    count = gpus if gpus > 1 else min(2, usable_cores())
    phases.begin(f"measuring communication between {count} processes")
    link = {} if count < 2 or (gpus == 1) else {"link": _link(count, kind)}
    phases.begin("measuring matmuls and memory")
    rates = rates_of(kind, SECONDS, **link)
    path = keep_rates(kind, rates)
    device, inside = rates["device"], rates["inside"]
    rows = [
        *((f"{name} matmuls", f"{rate / 1e9:,.4g} GFLOP/s") for name, rate in device["operations_per_second"].items()),
        ("memory", f"{device['bytes_per_second'] / 1e9:,.3g} GB/s"),
        ("to start an operator", f"{device['operator_seconds'] * 1e6:.3g} us"),
        ("communication", f"{inside['bytes_per_second'] / 1e9:.3g} GB/s, {inside['latency_seconds'] * 1e6:.3g} us"
                          + ("" if link else " (assumed: there is one device)")),
    ]  # fmt: skip
    each = "" if kind == "cuda" else ", one core"
    return "\n".join([f"{device['name']}{each}", *(f"  {line}" for line in aligned(rows)), f"wrote {path}", ""])


def _link(count: int, kind: DeviceKind) -> Link:
    """Bandwidth of a ring and latency of a step, from all-reduces of a large and a small tensor."""
    speed = measure_communication(count, kind, SECONDS)
    if isinstance(speed, int):
        raise OnwardError(
            f"{count} processes on this machine's {kind} cannot communicate (exit code {speed}). Run `onward doctor`."
        )
    steps = 2 * math.ceil(math.log2(count))
    return Link(speed.bytes_per_second * 2 * (count - 1) / count, speed.latency_seconds / steps)
