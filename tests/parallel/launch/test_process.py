"""The mesh: groups along every dimension, devices and backends that are possible, and the meeting of the processes."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

from onward.errors import ParametersError
from onward.parallel.agreement import UpdateAgreement, agree_on_any, check_same
from onward.parallel.launch.process import check_devices, choose_backend, in_world_of_one, start
from onward.parallel.rendezvous.launcher import Launch
from onward.parallel.rendezvous.rendezvous import UnreachableStoreError, open_store, rendezvous, wait_for_all
from onward.parameters.distributed import Distributed
from onward.plan.topology import Place, Topology
from tests.parallel.starting import free_port
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


def test_groups_are_the_topologys() -> None:
    topology = Topology(2, 2, 2)
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


def stop_wishes() -> tuple[list[bool], list[bool]]:
    mesh = start(Distributed(pipeline_parallel_size=3), "cpu")
    stopping, ending = UpdateAgreement(mesh), UpdateAgreement(mesh)
    after = [stopping.after_update(mesh.rank == 1 and update == 2).stops for update in range(4)]
    at_end = [ending.after_update(mesh.rank == 2).stops, ending.stops_at_end(False)]
    return after, [*at_end, ending.stops_at_end(mesh.rank == 0), ending.stops_at_end(False)]


def test_wish_of_one_rank_stops_all_after_the_same_update_the_next_or_at_the_end() -> None:
    expected = ([False, False, False, True], [False, True, True, False])
    assert run_on_ranks(3, stop_wishes) == [expected] * 3


def given_numbers() -> list[object]:
    """Rank 0 alone gives the first number, every rank the second; after the third update nothing follows."""
    mesh = start(Distributed(data_parallel_size=3), "cpu")
    agreement = UpdateAgreement(mesh, ("rate", "rank"))
    heard = []
    for update in range(3):
        rate = {"rate": 0.25} if mesh.rank == 0 and update == 1 else {}
        heard.append(agreement.after_update(False, {"rank": float(mesh.rank), **rate}))
    return [tuple(one.numbers.values()) for one in (*heard, agreement.settle(), agreement.settle())]


def test_the_largest_of_each_number_is_heard_by_all_one_update_later() -> None:
    expected = [(None, None), (None, 2.0), (0.25, 2.0), (None, 2.0), (None, None)]
    assert run_on_ranks(3, given_numbers) == [expected] * 3


def wishes_of_any() -> list[bool]:
    mesh = start(Distributed(data_parallel_size=2), "cpu")
    return [agree_on_any(mesh, wanted) for wanted in (False, mesh.rank == 1, True)]


def test_what_any_rank_wants_all_hear() -> None:
    assert run_on_ranks(2, wishes_of_any) == [[False, True, True]] * 2
    assert [agree_on_any(in_world_of_one(), wanted) for wanted in (False, True)] == [False, True]


def compare() -> str:
    mesh = start(Distributed(data_parallel_size=4), "cpu")
    check_same(mesh, {"parameters": "a" * 64, "version": "1.0"})
    try:
        check_same(
            mesh,
            {"model": "abc"[min(mesh.rank, 2)] * 64, "data": "d" * 64, **({"seed": "7"} if mesh.rank else {})},
        )
    except ParametersError as error:
        return str(error)
    return ""


def test_ranks_that_differ_are_named_with_what_they_have() -> None:
    answers = run_on_ranks(4, compare)
    assert len(set(answers)) == 1
    assert (
        "model: aaaaaaaaaaaaaaaa... on rank 0, bbbbbbbbbbbbbbbb... on rank 1, cccccccccccccccc... on ranks 2, 3"
        in (answers[0])
    )
    assert "seed: nothing on rank 0, 7 on ranks 1, 2, 3" in answers[0]
    assert "data" not in answers[0].partition(". Give")[0]


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


def launch_of(rank: int, size: int, port: int, job: str = "7") -> Launch:
    return Launch(
        launcher="Slurm",
        rank=rank,
        world_size=size,
        local_rank=rank,
        local_size=size,
        master_address="127.0.0.1",
        master_port=port,
        job=job,
    )


def test_ranks_that_did_not_come_are_named() -> None:
    launch = launch_of(0, 4, free_port())
    store = rendezvous(launch, 20.0)
    store.set("here/2", '["gpu7", 123, 4]')
    with pytest.raises(
        ParametersError, match=r"waited \d+ s for 4 processes; 2 came \(rank 0 on .+; rank 2 on gpu7\), "
    ):
        wait_for_all(store, launch, 0.1)
    store.set("here/1", '["gpu7", 122, 4]')
    with pytest.raises(ParametersError, match=r"ranks 1, 2 on gpu7\), rank 3 did not\. .*start_timeout_seconds"):
        wait_for_all(store, launch, 0.0)
    store.set("here/3", '["gpu7", 124, 4]')
    wait_for_all(store, launch, 0.0)


def test_nothing_answers_where_rank_0_should() -> None:
    port = free_port()
    with pytest.raises(ParametersError, match=rf"rank 1 of 2 .* waited \d+ s for rank 0 at 127.0.0.1:{port}, and noth"):
        rendezvous(launch_of(1, 2, port), 1.0)


def test_port_that_another_program_has() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ParametersError, match=rf"rank 0 cannot listen at port {port}.*Set MASTER_PORT"):
            rendezvous(launch_of(0, 2, port), 1.0)


def test_a_store_that_nobody_serves_is_waited_for_as_long_as_was_asked() -> None:
    """torch's own client takes two to four times as long as that."""
    started = time.monotonic()
    with pytest.raises(
        UnreachableStoreError, match=r"rank 1 of 2 .* waited 3 s for rank 0 at 127.0.0.1:\d+, and nothing"
    ):
        open_store(launch_of(1, 2, free_port()), 3.0)
    assert 2.0 < time.monotonic() - started < 5.0


def test_a_store_that_is_served_late_is_found() -> None:
    port, found = free_port(), []
    client = threading.Thread(target=lambda: found.append(open_store(launch_of(1, 2, port), 20.0)))
    client.start()
    time.sleep(1.0)
    owner = open_store(launch_of(0, 2, port), 20.0)
    client.join()
    owner.set("a", "b")
    assert found[0].get("a") == b"b"
    assert found[0].plain.underlying_store.timeout.total_seconds() == 20


@pytest.mark.parametrize("stray_comes_first", [False, True])
def test_ranks_of_another_start_are_refused(stray_comes_first: bool) -> None:
    port = free_port()
    errors: list[ParametersError] = []

    def stray() -> None:
        with pytest.raises(ParametersError) as caught:
            rendezvous(launch_of(1, 3, port, job="8"), 20.0)
        errors.append(caught.value)

    straying = threading.Thread(target=stray)
    if stray_comes_first:
        straying.start()
        owner = open_store(launch_of(0, 3, port), 20.0)
        time.sleep(0.2)  # the stray has found the store; its owner has not said yet whose it is
        owner.compare_set("job", "", "3 processes, Slurm job '7'")
    else:
        owner = open_store(launch_of(0, 3, port), 20.0)
        owner.compare_set("job", "", "3 processes, Slurm job '7'")
        straying.start()
    straying.join()
    caught = errors[0]
    assert "belongs to a start of 3 processes, Slurm job '8', but at 127.0.0.1:" in str(caught)
    assert "meets a start of 3 processes, Slurm job '7'. Set MASTER_PORT" in str(caught)


def test_rank_that_is_there_twice_is_refused() -> None:
    port = free_port()
    owner = open_store(launch_of(0, 3, port), 20.0)
    owner.compare_set("job", "", "3 processes, Slurm job '7'")
    owner.set("here/1", '["gpu7", 123, 4]')
    with pytest.raises(ParametersError, match=r"rank 1 exists twice: gpu7, process 123; and .*, process \d+\. Give"):
        rendezvous(launch_of(1, 3, port), 20.0)
