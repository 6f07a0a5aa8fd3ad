"""The hardware of this machine for the search of a layout: as measured and kept, as listed, or measured just now."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch

from onward.engine.matmul_rate import matmul_rate
from onward.errors import ParametersError, StorageError
from onward.operating_system import free_memory_bytes, processor_name, usable_cores
from onward.parallel.launch.process import DeviceKind
from onward.plan.search.hardware import Cluster, Device, Link, cluster_of, gpu_of, known_cluster
from onward.remote.copies import cache_folder
from onward.untrusted_files import parse_json, read_text

COPIED_BYTES = 64 * 2**20
_STARTED_OPERATORS = 300
_MOST_TIMES = 200
_UNMEASURED_LINK = Link(1.5e9, 5e-5)
"""Gloo over the loopback interface, until it is measured."""
CPU_OVERLAP = 0.0
"""Replicas on CPUs communicate with the cores that compute, and ranks together have threads for all of them."""


CALLS_OF_OPERATOR = 6.0
"""Calls of torch that an operator of a graph takes; forward and backward 16 to 20 were counted in four networks."""


def cluster_here(ranks_of_node: int, provider: Literal["CPU", "CUDA"] | None, *, measures: bool = True) -> Cluster:
    """Nodes like this machine, with so many ranks.

    Args:
        ranks_of_node: of a machine.
        provider: of the run's device.
        measures: whether rates that are not known may be measured; not where each of many ranks would find its own.

    Raises:
        ParametersError: the file of measured rates cannot be read, or there is none.
    """
    kind: DeviceKind = "cuda" if provider != "CPU" and torch.cuda.is_available() else "cpu"
    measured = measured_rates().get(kind)
    if measured is None and kind == "cuda":
        listed = gpu_of(torch.cuda.get_device_name())
        if listed is not None:
            return known_cluster(listed, ranks_of_node)
    if measured is None and not measures:
        raise ParametersError(
            "distributed.layout is auto, but how fast this machine is has not been measured, and processes that "
            "measure it at the same time would choose different layouts. Run `onward plan --calibrate` once, and give "
            f"every machine the file it writes ({str(rates_file())!r})."
        )
    found = cluster_of(rates_of(kind, 0.1) if measured is None else measured, ranks_of_node)
    return found if kind == "cuda" else _with_threads(found)


def _with_threads(cluster: Cluster) -> Cluster:
    """CPU rates are those of one core, and a rank has as many as are its share."""
    threads = max(1, int((cluster.cores or 1) // cluster.ranks_of_node))
    rates = {name: rate * threads for name, rate in cluster.device.operations_per_second.items()}
    ranks = (cluster.cores or 1) / threads
    if cluster.crowded is not None and cluster.ranks_of_node > ranks:
        cluster = replace(cluster, inside=cluster.crowded, between=cluster.crowded, is_crowded=True)
    return replace(
        cluster,
        cores=ranks,
        overlap=CPU_OVERLAP,
        scatter_is_reduce=True,
        device=replace(
            cluster.device,
            operations_per_second=rates,
            operator_seconds=cluster.device.operator_seconds * CALLS_OF_OPERATOR,
        ),
    )


def rates_file() -> Path:
    """Where measured rates are kept."""
    return cache_folder() / "hardware.json"


def measured_rates() -> Mapping[str, Any]:
    """Kind of device -> what was measured on this machine; empty where nothing was."""
    try:
        found = parse_json(read_text(rates_file()))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def keep_rates(kind: DeviceKind, rates: Mapping[str, Any]) -> Path:
    """Writes what was measured.

    Raises:
        StorageError: the file cannot be written.
    """
    path = rates_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**measured_rates(), kind: rates}, indent=1), encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"the measured rates cannot be written to {str(path)!r}: {error.strerror}. Set ONWARD_CACHE to another "
            "folder."
        ) from error
    return path


def rates_of(
    kind: DeviceKind, seconds: float, link: Link = _UNMEASURED_LINK, crowded: Link | None = None
) -> dict[str, Any]:
    """Rates of a device, of one core where it is a CPU, as `cluster_of` reads them.

    Args:
        kind: of device.
        seconds: for each measurement.
        link: between ranks of this machine.
        crowded: between more ranks than it has cores, where that was measured.
    """
    device = torch.device(kind)
    with _one_thread() if kind == "cpu" else contextlib.nullcontext():
        single = matmul_rate(device, torch.float32, seconds)
        half = matmul_rate(device, torch.bfloat16, seconds)
        bandwidth, started = _copied_bytes_per_second(device, seconds), _operator_seconds(device, seconds)
    is_gpu = kind == "cuda"
    memory = torch.cuda.get_device_properties(0).total_memory if is_gpu else free_memory_bytes()
    found = Device(
        name=torch.cuda.get_device_name() if is_gpu else processor_name(),
        operations_per_second={"fp32": single, "bf16": half, "fp16": half},
        memory_bytes=float(memory),
        bytes_per_second=bandwidth,
        operator_seconds=started,
        is_asynchronous=is_gpu,
        reserved_bytes=2e9 if is_gpu else 0.3e9,
    )
    ranks, cores = (torch.cuda.device_count(), None) if is_gpu else (usable_cores(), usable_cores())
    links = {"inside": asdict(link)} | ({} if crowded is None else {"crowded": asdict(crowded)})
    return {"device": asdict(found), **links, "ranks_of_node": ranks, "cores": cores}


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _copied_bytes_per_second(device: torch.device, seconds: float) -> float:
    """Read and written."""
    source = torch.ones(COPIED_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / _shortest(lambda: target.copy_(source), device, seconds)


def _operator_seconds(device: torch.device, seconds: float) -> float:
    """Of the host, to start a small operator whose gradient is recorded."""
    small = torch.zeros(8, device=device, requires_grad=True)

    def many() -> None:
        value = small
        for _ in range(_STARTED_OPERATORS):
            value = value + 1.0

    return _shortest(many, device, seconds) / _STARTED_OPERATORS


def _shortest(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Of several times, for so many seconds: whatever else the machine does can only make one longer."""
    found, ends = _seconds_of(work, device), time.perf_counter() + seconds
    for _ in range(_MOST_TIMES):  # also by a clock that has stopped
        found = min(found, _seconds_of(work, device))
        if time.perf_counter() >= ends:
            break
    return found


def _seconds_of(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max(time.perf_counter() - started, 1e-9)
