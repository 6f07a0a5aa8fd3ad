"""What layouts are priced with: how fast a device computes, and what collectives take between devices.

Communication follows the alpha-beta model (Hockney, 1994): a latency and a bandwidth for each level, with the volumes
of ring algorithms (Patarasuk and Yuan, 2009); small all-reduces take the steps of a tree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from onward.errors import ParametersError
from onward.spelling import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Device:
    """One rank's processor.

    Attributes:
        name: as `--gpu` takes it.
        operations_per_second: element type -> attainable rate of large matmuls.
        memory_bytes: of its memory.
        bytes_per_second: attainable bandwidth of its memory.
        operator_seconds: that the host takes to start an operator.
        is_asynchronous: whether the host starts operators ahead of the device, as with GPUs.
        reserved_bytes: that the driver and the libraries of collectives take.
        peak_operations_per_second: element type -> rate of the vendor's data sheet, where there is one.
        compute_capability: of a listed NVIDIA GPU: bf16 matmuls need (8, 0), FP8 matmuls (8, 9).
    """

    name: str
    operations_per_second: Mapping[str, float]
    memory_bytes: float
    bytes_per_second: float
    operator_seconds: float = 6e-6
    is_asynchronous: bool = True
    reserved_bytes: float = 2e9
    peak_operations_per_second: Mapping[str, float] = field(default_factory=dict)
    compute_capability: tuple[int, int] | None = None

    @property
    def computes_in_bf16(self) -> bool | None:
        """Whether it multiplies bf16; None: that is not known from a list."""
        return None if self.compute_capability is None else self.compute_capability >= (8, 0)

    def check_types(self, precision: str, float8: bool) -> str | None:
        """What to note on the types of a run's matmuls; None: nothing.

        Raises:
            ParametersError: the device does not compute in them.
        """
        capability = self.compute_capability
        version = "" if capability is None else f" (compute capability {capability[0]}.{capability[1]})"
        if precision not in self.operations_per_second:
            raise ParametersError(
                f"mixed_precision asks for {precision}, but {self.name}{version} has no {precision} matmuls; they need "
                "an Ampere or newer GPU (8.0 or higher). Set mixed_precision.use_bfloat16: false for fp16, or "
                "use_mixed_precision: auto, or choose another GPU."
            )
        if not float8:
            return None
        if capability is not None and capability < (8, 9):
            raise ParametersError(
                f"mixed_precision.float8 is true, but {self.name}{version} has no FP8 matmuls; they need an Ada, "
                "Hopper or newer GPU (8.9 or higher). Remove it, or choose another GPU."
            )
        return f"mixed_precision.float8: no FP8 rates are known, so that matmuls are forecast in {precision}."


@dataclass(frozen=True)
class Link:
    """A level of the network, in one direction, of one rank.

    Attributes:
        bytes_per_second: in rings.
        latency_seconds: of a step.
        gathered_bytes_per_second, scattered_bytes_per_second: of all-gathers and reduce-scatters, where they are
            slower than all-reduces for the bytes that they send, as with Gloo; None: they are not.
    """

    bytes_per_second: float
    latency_seconds: float
    gathered_bytes_per_second: float | None = None
    scattered_bytes_per_second: float | None = None

    def at(self, bytes_per_second: float, latency_seconds: float) -> Link:
        """Another link over which the same collectives are slower."""
        more = bytes_per_second / self.bytes_per_second
        gathered, scattered = self.gathered_bytes_per_second, self.scattered_bytes_per_second
        return Link(bytes_per_second, latency_seconds, gathered and gathered * more, scattered and scattered * more)


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: how many, and how many of them are on one node."""

    size: int
    of_node: int


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal devices in equal nodes.

    Attributes:
        device: of every rank.
        ranks_of_node: ranks of one machine.
        inside: between ranks of a node.
        between: from a rank to another node, where each rank has its own network adapter.
        cores: ranks of a node that can compute at the same time; None: all.
        overlap: share of the time of computing in which replicas can communicate without slowing it down.
        scatter_is_reduce: whether a reduce-scatter is an all-reduce of which ranks keep their shards, as with Gloo.
        crowded: between ranks of a node that are more than it has cores, and wait for one, too; None: not measured.
        is_crowded: whether `inside` is that.
    """

    device: Device
    ranks_of_node: int
    inside: Link
    between: Link
    cores: float | None = None
    overlap: float = 0.8
    scatter_is_reduce: bool = False
    crowded: Link | None = None
    is_crowded: bool = False

    def group(self, size: int, stride: int) -> Group:
        """Ranks whose numbers differ by `stride`, as a dimension of the mesh has them."""
        return Group(size, max(1, min(size, self.ranks_of_node // stride)))

    def _link(self, group: Group) -> Link:
        """Ranks of a node that are in one group use their adapters together."""
        if group.of_node >= group.size:
            return self.inside
        rate = min(self.inside.bytes_per_second, self.between.bytes_per_second * group.of_node)
        return self.between.at(rate, self.between.latency_seconds)

    def all_reduce(self, size_bytes: float, group: Group, calls: float = 1.0) -> float:
        """Seconds of so many all-reduces of `size_bytes` together; small ones take the steps of a tree."""
        if group.size == 1:
            return 0.0
        steps = 2.0 * math.ceil(math.log2(group.size)) * self._link(group).latency_seconds
        return 2.0 * self._travel(size_bytes, group) + calls * steps

    def scatter(self, size_bytes: float, group: Group, calls: float = 1.0) -> float:
        """Seconds of so many reduce-scatters of `size_bytes`, of the full tensor, together."""
        link = self._link(group)
        if self.scatter_is_reduce and link.scattered_bytes_per_second is None:
            return self.all_reduce(size_bytes, group, calls)
        return self._ring(size_bytes, group, calls, link.scattered_bytes_per_second)

    def gather(self, size_bytes: float, group: Group, calls: float = 1.0) -> float:
        """Seconds of so many all-gathers of `size_bytes`, of the full tensor, together; in rings."""
        return self._ring(size_bytes, group, calls, self._link(group).gathered_bytes_per_second)

    def share_tokens(self, size_bytes: float, group: Group, calls: float = 1.0) -> float:
        """Seconds of so many reduce-scatters, each with an all-gather of the same size, instead of all-reduces."""
        if not self.scatter_is_reduce:
            return self.all_reduce(size_bytes, group, calls)
        return self.scatter(size_bytes, group, calls) + self.gather(size_bytes, group, calls)

    def _ring(self, size_bytes: float, group: Group, calls: float, rate: float | None) -> float:
        if group.size == 1:
            return 0.0
        nodes = group.size / group.of_node
        steps = (group.size - nodes) * self.inside.latency_seconds
        steps += (nodes - 1) * self.between.latency_seconds
        return self._travel(size_bytes, group, rate) + calls * steps

    def _travel(self, size_bytes: float, group: Group, rate: float | None = None) -> float:
        return size_bytes * (group.size - 1) / group.size / (rate or self._link(group).bytes_per_second)

    def send(self, size_bytes: float, stride: int) -> float:
        """Seconds until a neighbor in the pipeline, `stride` ranks away, has a tensor."""
        link = self.inside if stride < self.ranks_of_node else self.between
        return size_bytes / link.bytes_per_second + link.latency_seconds


def _gpu(
    name: str,
    peak_tflops: float,
    memory_gb: float,
    memory_gb_per_second: float,
    *,
    links: tuple[float, float],
    share: float,
    fp32_tflops: float,
    capability: tuple[int, int],
) -> Cluster:
    """A GPU of which the vendor's sheet gives the peak; `links` are GB/s one way inside of a node and between nodes."""
    rate = peak_tflops * 1e12 * share
    low = ("bf16", "fp16") if capability >= (8, 0) else ("fp16",)
    device = Device(
        name=name,
        operations_per_second={**dict.fromkeys(low, rate), "fp32": fp32_tflops * 1e12 * 0.85},
        memory_bytes=memory_gb * 1e9,
        bytes_per_second=memory_gb_per_second * 1e9 * 0.8,
        peak_operations_per_second={**dict.fromkeys(low, peak_tflops * 1e12), "fp32": fp32_tflops * 1e12},
        compute_capability=capability,
    )
    inside, between = (Link(rate * 1e9 * 0.75, seconds) for rate, seconds in zip(links, (4e-6, 1.2e-5), strict=True))
    return Cluster(device=device, ranks_of_node=8, inside=inside, between=between)


KNOWN: Mapping[str, Cluster] = {
    one.device.name: one
    for one in (
        _gpu("v100", 125, 34, 900, links=(150, 12.5), share=0.7, fp32_tflops=15.7, capability=(7, 0)),
        _gpu("a100", 312, 85, 2039, links=(300, 25), share=0.72, fp32_tflops=19.5, capability=(8, 0)),
        _gpu("a100-40gb", 312, 42, 1555, links=(300, 25), share=0.72, fp32_tflops=19.5, capability=(8, 0)),
        _gpu("t4", 65, 15.8, 320, links=(16, 12.5), share=0.6, fp32_tflops=8.1, capability=(7, 5)),
        _gpu("l40s", 362, 48, 864, links=(32, 12.5), share=0.6, fp32_tflops=91.6, capability=(8, 9)),
        _gpu("h100", 989, 85, 3350, links=(450, 50), share=0.62, fp32_tflops=67, capability=(9, 0)),
        _gpu("h200", 989, 150, 4800, links=(450, 50), share=0.62, fp32_tflops=67, capability=(9, 0)),
        _gpu("b200", 2250, 191, 8000, links=(900, 50), share=0.62, fp32_tflops=75, capability=(10, 0)),
    )
}
"""NVIDIA's data sheets: dense bf16 (V100, T4: fp16) rate, memory (in 10^9 bytes, as the driver reports it),
NVLink (PCIe for T4 and L40S) and the network of its reference systems. The attainable shares of
a100 and h100 fit published runs (benchmarks/layout_choice.md); those of the others are assumed to be alike."""


def known_cluster(name: str, ranks_of_node: int | None = None) -> Cluster:
    """Nodes of GPUs that are listed.

    Raises:
        ParametersError: the GPU is not.
    """
    found = KNOWN.get(name.lower())
    if found is None:
        raise ParametersError(
            f"--gpu {name!r} is not listed.{did_you_mean(name, KNOWN)} Pass one of {', '.join(KNOWN)}, or measure "
            "this machine with `onward plan --calibrate` and leave --gpu out."
        )
    return found if ranks_of_node is None else replace(found, ranks_of_node=ranks_of_node)


def gpu_of(device_name: str) -> str | None:
    """The listed GPU that a driver calls `NVIDIA A100-SXM4-80GB` or the like; None: it is not listed."""
    words = device_name.lower().replace("-", " ").split()
    found = [name for name in KNOWN if name.split("-")[0] in words]
    by_memory = [name for name in found if "-" in name and name.split("-")[1] in words]
    return next(iter(by_memory or found), None)


def cluster_of(measured: Mapping[str, Any], ranks_of_node: int | None = None) -> Cluster:
    """What `onward plan --calibrate` measured and keeps; nodes are taken to be connected as their ranks are.

    Raises:
        ParametersError: it is no such file.
    """
    try:
        device = Device(**{one: measured["device"][one] for one in measured["device"]})
        inside = Link(**measured["inside"])
        crowded = Link(**measured["crowded"]) if measured.get("crowded") else None
        cores, ranks = measured["cores"], ranks_of_node or int(measured["ranks_of_node"])
        return Cluster(device=device, ranks_of_node=ranks, inside=inside, between=inside, cores=cores, crowded=crowded)
    except (KeyError, TypeError, ValueError) as error:
        raise ParametersError(
            "the rates of this machine cannot be read. Measure them again with `onward plan --calibrate`."
        ) from error
