"""How processes become one run: the meeting, the process group, and the mesh with its dimensions.

NCCL joins GPUs, Gloo joins CPUs; a world of one process has no group at all.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from onward.errors import ParametersError
from onward.parallel.rendezvous.launcher import Launch, detect
from onward.parallel.rendezvous.rendezvous import choose_interface, rendezvous, wait_for_all
from onward.parallel.rendezvous.run_store import RunStore
from onward.parallel.watch.failure import Membership
from onward.parallel.watch.flight_recorder import record_collectives
from onward.parameters.distributed import Distributed
from onward.plan.topology import Place, Topology

DIMENSIONS = ("pipeline", "data", "horizontal")
"""Of the device mesh, slowest first. `data` are the replicas of a worker of local SGD; of several, `WORKERS` is before
it."""

WORKERS = "workers"

ZERO_DIMENSIONS = ("zero_groups", "zero")

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """All processes of a run, and this one's place among them.

    Attributes:
        topology: sizes of the dimensions.
        rank: this process.
        device: what it computes on.
        data: the replicas that reduce gradients at every update: all of them, or those of its worker of local SGD;
            None where it is alone.
        horizontal, pipeline, context: the other groups it belongs to; None where the size is 1.
        replicas: all replicas; the same as `data` without local SGD.
        workers: the replicas at the same place in every worker of local SGD; None where there is one worker.
        worker: all ranks of its worker; None where that is all ranks, or it alone.
        experts: replicas that share the experts of every layer; None where each has all of them.
        expert_copies: replicas that hold the same experts; None where there is one.
        device_mesh: torch's view of the same, with dimensions `DIMENSIONS`; None in a world of one.
        zero_mesh: the replicas as groups by ranks of a group, dimensions `ZERO_DIMENSIONS`; None where ZeRO shards
            among all of them.
        control: all ranks over Gloo, for decisions of the host: apart from the groups that carry tensors, so that
            collectives of other threads (a checkpoint being written) never mix with it; None in a world of one.
        membership: of this process in the run; counts its updates and ends its part.
    """

    topology: Topology
    rank: int
    device: torch.device
    data: dist.ProcessGroup | None = None
    horizontal: dist.ProcessGroup | None = None
    pipeline: dist.ProcessGroup | None = None
    context: dist.ProcessGroup | None = None
    replicas: dist.ProcessGroup | None = None
    workers: dist.ProcessGroup | None = None
    worker: dist.ProcessGroup | None = None
    experts: dist.ProcessGroup | None = None
    expert_copies: dist.ProcessGroup | None = None
    device_mesh: DeviceMesh | None = None
    zero_mesh: DeviceMesh | None = None
    control: dist.ProcessGroup | None = None
    membership: Membership = field(default_factory=Membership, compare=False)

    @property
    def zero(self) -> dist.ProcessGroup | None:
        """The replicas among which ZeRO shards; None in a group of one."""
        return self.data if self.zero_mesh is None else self.zero_mesh.get_group(ZERO_DIMENSIONS[1])

    @property
    def place(self) -> Place:
        """Where this process is."""
        return self.topology.place(self.rank)

    @property
    def reader(self) -> int:
        """Which part of the data it reads, of `topology.reader_count`."""
        return self.topology.reader(self.place)

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return self.topology.world_size

    @property
    def ranks_of_worker(self) -> int:
        """How many of them are of its worker of local SGD; all without it."""
        return self.world_size // self.topology.worker_count


def in_world_of_one(device_kind: DeviceKind = "cpu") -> Mesh:
    """The mesh of a process that trains alone."""
    return Mesh(topology=Topology(), rank=0, device=torch.device(device_kind))


def start(
    distributed: Distributed,
    device_kind: DeviceKind,
    run_folder: Path | None = None,
    membership: Membership | None = None,
) -> Mesh:
    """Meets the other processes and builds the mesh; uses the default group of a program that has one already.

    Args:
        distributed: sizes and timeouts.
        device_kind: what the run computes on.
        run_folder: where a file is written that tells what every rank was doing, if they hang.
        membership: from `ending_together`, which reports failures through it; one is made where none is given.

    Raises:
        ParametersError: sizes, devices, `use_nccl` or the launcher's variables are impossible, or the others did not
            come within `start_timeout_seconds`.
    """
    timeout = timedelta(seconds=distributed.timeout_seconds)
    membership = membership or Membership()
    if dist.is_initialized():
        topology = Topology.of(distributed, dist.get_world_size())
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = _device(device_kind, local_rank)
        return _make_mesh(topology, distributed.expert_parallel_size, device, timeout, membership)
    launch = detect()
    topology = Topology.of(distributed, launch.world_size)
    backend = choose_backend(distributed.use_nccl, device_kind)
    check_devices(device_kind, launch)
    if launch.world_size == 1:
        return in_world_of_one(device_kind)
    device = _device(device_kind, launch.local_rank)
    if device_kind == "cuda":
        torch.cuda.set_device(device)
    store = rendezvous(launch, distributed.start_timeout_seconds)
    membership.begin(store, launch, distributed.timeout_seconds, run_folder)
    record_collectives(run_folder)
    wait_for_all(store, launch, distributed.start_timeout_seconds)
    check_same_mesh(store, launch, topology)
    choose_interface(launch)
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store.plain),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
        device_id=device if backend.endswith("nccl") else None,
    )
    return _make_mesh(topology, distributed.expert_parallel_size, device, timeout, membership)


def check_same_mesh(store: RunStore, launch: Launch, topology: Topology) -> None:
    """Ranks that were given other sizes would wait for groups that never form.

    Raises:
        ParametersError: another rank has other sizes.
    """
    sizes = topology.as_text
    first = store.compare_set("mesh", "", sizes).decode()
    if first != sizes:
        raise ParametersError(
            f"rank {launch.rank} was asked for {sizes}, another one for {first}. Give all processes the same RUN.yaml "
            "and options; for distributed.layout auto, machines of the same kind, or set the sizes."
        )


def stop(mesh: Mesh) -> None:
    """Leaves the group after the others have come here, too; nothing to do in a world of one."""
    if mesh.control is not None:
        dist.barrier(group=mesh.control)
    mesh.membership.end()
    if dist.is_initialized():
        dist.destroy_process_group()


def choose_backend(use_nccl: bool | None, device_kind: DeviceKind) -> str:
    """What carries tensors: `cpu:gloo,cuda:nccl` on GPUs; Gloo elsewhere, and where it is asked for.

    Raises:
        ParametersError: NCCL is demanded where it cannot be.
    """
    if device_kind == "cpu":
        if use_nccl:
            why = "runs on the CPU" if torch.cuda.is_available() else "runs on the CPU; torch finds no GPU here"
            raise ParametersError(
                f"distributed.use_nccl is true, but this run {why}, and NCCL joins GPUs only. Leave use_nccl out (Gloo "
                "joins CPUs), or train on machines with GPUs."
            )
        return "gloo"
    if use_nccl is False:
        return "cpu:gloo,cuda:gloo"
    if not dist.is_nccl_available():
        raise ParametersError(
            "NCCL joins GPUs, but this build of torch comes without it. Install a CUDA build of torch, or set "
            "distributed.use_nccl to false for Gloo, which is slower."
        )
    return "cpu:gloo,cuda:nccl"


def check_devices(device_kind: DeviceKind, launch: Launch) -> None:
    """Each process of a machine needs its own GPU.

    Raises:
        ParametersError: there are more processes than GPUs.
    """
    if device_kind == "cpu":
        return
    count = torch.cuda.device_count()
    if launch.local_size > count:
        raise ParametersError(
            f"{launch.launcher} started {launch.local_size} processes on this machine, which has {count} "
            f"GPU{'' if count == 1 else 's'}; each process needs its own. Start {count} on each machine like "
            "this, or set machine.execution_provider to CPU."
        )


def _device(device_kind: DeviceKind, local_rank: int) -> torch.device:
    return torch.device("cpu") if device_kind == "cpu" else torch.device("cuda", local_rank)


def _make_mesh(
    topology: Topology, expert_size: int, device: torch.device, timeout: timedelta, membership: Membership
) -> Mesh:
    """Groups along every dimension, all with the run's own timeout."""
    rank = dist.get_rank()
    if topology.world_size == 1:
        return Mesh(topology=topology, rank=rank, device=device, membership=membership)
    sizes = dict(zip(DIMENSIONS, (topology.pipeline_size, topology.worker_size, topology.horizontal_size), strict=True))
    if topology.worker_count > 1:
        sizes = {"pipeline": sizes["pipeline"], WORKERS: topology.worker_count, **sizes}
    device_mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    groups = dict(zip(sizes, device_mesh.get_all_groups(), strict=True))
    for group in groups.values():
        # Groups of a mesh begin with torch's timeout (10 or 30 minutes) whatever the default group has.
        set_group_timeout(timeout, group)
    used = {name: group if sizes[name] > 1 else None for name, group in groups.items()}
    replicas = {
        "context": topology.context_groups(),
        "experts": topology.successive_replicas(expert_size),
        "expert_copies": topology.spaced_replicas(expert_size) if expert_size > 1 else (),
        "worker": topology.worker_groups() if topology.worker_count > 1 else (),
    }
    if topology.worker_count > 1:
        replicas["replicas"] = topology.data_groups()
    else:
        used["replicas"] = used["data"]
    for name, members in replicas.items():
        if members and len(members[0]) > 1:
            used[name], _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
                [list(group) for group in members], timeout=timeout
            )
    zero_mesh = None
    if topology.zero_size < topology.worker_size:
        zero_size = topology.zero_size
        in_groups = {**sizes, "data": topology.worker_size // zero_size}
        names = tuple(name for one in in_groups for name in (ZERO_DIMENSIONS if one == "data" else (one,)))
        shape = tuple(n for one, size in in_groups.items() for n in ((size, zero_size) if one == "data" else (size,)))
        zero_mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)[ZERO_DIMENSIONS]
        for group in zero_mesh.get_all_groups():
            set_group_timeout(timeout, group)
    control = dist.new_group(backend="gloo", timeout=timeout)
    return Mesh(
        topology=topology,
        rank=rank,
        device=device,
        **used,
        device_mesh=device_mesh,
        zero_mesh=zero_mesh,
        control=control,
        membership=membership,
    )


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    """`torch.distributed.set_timeout`, which torch has since 2.14; the private function before it."""
    public = getattr(dist, "set_timeout", None)
    (dist.distributed_c10d._set_pg_timeout if public is None else public)(timeout, group)
