"""Ranks rendezvous: who did not come, came twice, or belongs to another start is named."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

import pytest

from onward.errors import OnwardError, ParametersError
from onward.parallel.rendezvous.launcher import LAUNCHED_BY_US, Launch
from onward.parallel.rendezvous.rendezvous import UnreachableStoreError, open_store, rendezvous, wait_for_all
from tests.parallel.starting import free_port


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


def test_a_worker_whose_launcher_was_killed_while_it_looks_for_the_store_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setenv(LAUNCHED_BY_US, str(launcher.pid))
    killer, started = threading.Timer(0.3, launcher.kill), time.monotonic()
    killer.start()
    with pytest.raises(OnwardError, match=rf"onward train \(process {launcher.pid}\), which started .* is gone"):
        rendezvous(launch_of(1, 2, free_port()), 60.0)
    assert time.monotonic() - started < 30.0
    launcher.communicate()


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
