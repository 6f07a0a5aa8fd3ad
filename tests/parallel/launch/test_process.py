"""The mesh: groups along every dimension, and the devices and backends that are possible."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from onward.errors import ParametersError
from onward.parallel.agreement import UpdateAgreement, check_same
from onward.parallel.launch.process import (
    check_devices,
    check_same_mesh,
    choose_backend,
    in_world_of_one,
    set_group_timeout,
    start,
)
from onward.parallel.rendezvous.launcher import Launch
from onward.parallel.rendezvous.run_store import RunStore
from onward.parameters.distributed import Distributed
from onward.plan.topology import Place, Topology
from tests.ranks import run_on_ranks


def places_and_neighbours() -> dict[str, object]:
    mesh = start(Distributed(data_parallel_size=2, horizontal_parallel_size=2, pipeline_parallel_size=2), "cpu")
    assert mesh.device_mesh is not None
    assert mesh.device_mesh.mesh_dim_names == ("pipeline", "data", "horizontal")
    sums = {}
    for name in ("pipeline", "data", "horizontal"):
        total = torch.tensor([2.0**mesh.rank])
        dist.all_reduce(total, group=getattr(mesh, name))
        sums[name] = int(total)
    return {"rank": mesh.rank, "place": mesh.place, **sums}


def test_ranks_of_other_sizes_are_told_before_their_groups_are_made() -> None:
    store = RunStore(HashStore(), "run", None)
    for rank in (0, 1):
        check_same_mesh(store, Launch(rank=rank, world_size=4), Topology(data_size=2, pipeline_size=2))
    with pytest.raises(ParametersError, match=r"rank 3 was asked for 4 data x 1 .*, another one for 2 data x 1 tensor"):
        check_same_mesh(store, Launch(rank=3, world_size=4), Topology(data_size=4))


def test_groups_are_the_topologys() -> None:
    topology = Topology(data_size=2, horizontal_size=2, pipeline_size=2)
    answers = run_on_ranks(8, places_and_neighbours)
    for rank, answer in enumerate(answers):
        assert (answer["rank"], answer["place"]) == (rank, topology.place(rank))
        for name in ("data", "horizontal", "pipeline"):
            groups = getattr(topology, f"{name}_groups")()
            group = next(ranks for ranks in groups if rank in ranks)
            assert answer[name] == sum(2**one for one in group)


def groups_of_size_one() -> tuple[bool, bool, bool, float]:
    mesh = start(Distributed(data_parallel_size=2, timeout_seconds=17.0), "cpu")
    assert mesh.data is not None
    timeout = mesh.data._get_backend(torch.device("cpu")).options._timeout
    return mesh.horizontal is None, mesh.pipeline is None, mesh.control is None, timeout.total_seconds()


def test_dimension_of_size_one_has_no_group_and_the_others_have_the_runs_timeout() -> None:
    assert run_on_ranks(2, groups_of_size_one) == [(True, True, False, 17.0)] * 2


def test_world_of_one_has_no_groups_and_agrees_with_itself() -> None:
    mesh = start(Distributed(), "cpu")
    assert mesh == in_world_of_one()
    assert (mesh.place, mesh.world_size, mesh.device_mesh) == (Place(0, 0, 0), 1, None)
    assert not dist.is_initialized()
    check_same(mesh, {"model": "a"})
    stopping = UpdateAgreement(mesh)
    assert [stopping.after_update(wanted).stops for wanted in (False, True)] == [False, True]
    assert [stopping.stops_at_end(wanted) for wanted in (False, True)] == [False, True]


def test_sizes_must_be_the_number_of_processes() -> None:
    with pytest.raises(ParametersError, match=r"data_parallel_size 2 .* = 2, but there are 1 processes"):
        start(Distributed(data_parallel_size=2), "cpu")


def test_nccl_is_refused_on_the_cpu() -> None:
    with pytest.raises(ParametersError, match=r"use_nccl is true, but this run runs on the CPU.*Leave use_nccl out"):
        start(Distributed(use_nccl=True), "cpu")


def test_nccl_is_refused_where_torch_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(ParametersError, match=r"build of torch comes without it.*use_nccl to false"):
        choose_backend(None, "cuda")
    assert choose_backend(False, "cuda") == "cpu:gloo,cuda:gloo"


def test_backends() -> None:
    assert choose_backend(None, "cpu") == choose_backend(False, "cpu") == "gloo"
    if dist.is_nccl_available():
        assert choose_backend(None, "cuda") == choose_backend(True, "cuda") == "cpu:gloo,cuda:nccl"


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    launch = Launch(launcher="torchrun", rank=0, world_size=4, local_rank=0, local_size=4)
    with pytest.raises(ParametersError, match=r"torchrun started 4 processes on this machine, which has 2 GPUs"):
        check_devices("cuda", launch)
    check_devices("cpu", launch)
    check_devices("cuda", dataclasses.replace(launch, local_size=2))


def test_timeouts_are_set_by_the_public_function_of_a_torch_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.14 warns of the private one."""
    group, asked = dist.ProcessGroup(0, 1), list[object]()
    monkeypatch.setattr(dist, "set_timeout", lambda *arguments: asked.append(arguments), raising=False)
    monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", None)
    set_group_timeout(timedelta(seconds=17), group)
    assert asked == [(timedelta(seconds=17), group)]
