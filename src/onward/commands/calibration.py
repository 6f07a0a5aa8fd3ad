"""`onward plan --calibrate`: the rates of this machine, measured and kept for the search of layouts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

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
CROWD = 2
"""Processes for each core, to measure what those that wait for a core wait for each other."""
MOST_PROCESSES = 16
"""That are started for it; a machine with more cores has a core for each of its ranks."""


def calibrate(phases: Phases) -> str:
    """Measures one device and communication between all of them; returns what to print.

    Raises:
        OnwardError: processes of this machine cannot communicate.
        StorageError: the rates cannot be written.
    """
    gpus = torch.cuda.device_count()
    kind: DeviceKind = "cuda" if gpus else "cpu"
    count = gpus if gpus > 1 else min(2, usable_cores())
    links: dict[str, Link] = {}
    many = CROWD * usable_cores() if kind == "cpu" and CROWD * usable_cores() <= MOST_PROCESSES else 0
    for name, processes in (("link", count if gpus != 1 else 0), ("crowded", many)):
        if processes > 1:
            phases.begin(f"measuring communication between {processes} processes")
            links[name] = _link(processes, kind)
    phases.begin("measuring matmuls and memory")
    rates = rates_of(kind, SECONDS, **links)
    path = keep_rates(kind, rates)
    device = rates["device"]
    rows = [
        *((f"{name} matmuls", f"{rate / 1e9:,.4g} GFLOP/s") for name, rate in device["operations_per_second"].items()),
        ("memory", f"{device['bytes_per_second'] / 1e9:,.3g} GB/s"),
        ("to start an operator", f"{device['operator_seconds'] * 1e6:.3g} us"),
        ("communication", _words(rates["inside"]) + ("" if "link" in links else " (assumed: there is one device)")),
        *([(f"between {many} processes", _words(rates["crowded"]))] if "crowded" in rates else []),
    ]  # fmt: skip
    each = "" if kind == "cuda" else ", one core"
    return "\n".join([f"{device['name']}{each}", *(f"  {line}" for line in aligned(rows)), f"wrote {path}", ""])


def _words(link: Mapping[str, Any]) -> str:
    """All-reduces first, and their latency."""
    kinds = (("all-gathers", "gathered_bytes_per_second"), ("reduce-scatters", "scattered_bytes_per_second"))
    rates = [(name, link[field]) for name, field in kinds]
    more = "".join(f", {name} {rate / 1e9:.3g} GB/s" for name, rate in rates if rate is not None)
    return f"{link['bytes_per_second'] / 1e9:.3g} GB/s, {link['latency_seconds'] * 1e6:.3g} us{more}"


def _link(count: int, kind: DeviceKind) -> Link:
    """Bandwidths of rings and latency of a step, from all-reduces of a large and a small tensor, and other rings."""
    speed = measure_communication(count, kind, SECONDS)
    if isinstance(speed, int):
        raise OnwardError(
            f"{count} processes on this machine's {kind} cannot communicate (exit code {speed}). Run `onward doctor`."
        )
    steps, sent = 2 * math.ceil(math.log2(count)), (count - 1) / count
    return Link(
        speed.bytes_per_second * 2 * sent,
        speed.latency_seconds / steps,
        speed.gathered_bytes_per_second * sent,
        speed.scattered_bytes_per_second * sent,
    )
