"""What strangers reach of a run: nothing where all processes are on one machine; and pickles, which nobody loads."""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d

from onward.parallel.rendezvous.launcher import Launch
from onward.parallel.rendezvous.listening import address_to_bind, listen, listening_note
from onward.parallel.rendezvous.rendezvous import open_store
from tests.invariants.elastic import make_workplace
from tests.invariants.lives import Life, wait_until
from tests.parallel.listeners import Listener, listeners_of
from tests.parallel.starting import (
    LONGEST_SECONDS,
    WORKER,
    environment,
    free_port,
    mpirun,
    needs_mpirun,
    own_launcher,
    two_nodes,
    wait_for,
)
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="several processes need Linux")
RENDEZVOUS_SECONDS = 8.0
"""torch's elastic launcher reads its state from the store every five seconds."""


def slurm(count: int) -> list[str]:
    """A shell that starts the workers with the variables of a Slurm step on one machine."""
    names = f"SLURM_JOB_ID=12 SLURM_STEP_ID=3 SLURM_STEP_NUM_TASKS={count} SLURM_STEP_TASKS_PER_NODE={count}"
    one = f'{names} SLURM_NODEID=0 SLURM_PROCID=$i SLURM_LOCALID=$i MASTER_ADDR=$(hostname) "$@" & '
    script = f"for i in $(seq 0 {count - 1}); do {one}done; wait"
    return ["env", f"MASTER_PORT={free_port()}", "sh", "-c", script, "sh", sys.executable]


LAUNCHERS = [
    pytest.param(own_launcher, id="onward"),
    pytest.param(mpirun, id="mpirun", marks=needs_mpirun),
    pytest.param(slurm, id="Slurm"),
]


@contextlib.contextmanager
def running(launcher: Callable[[int], list[str]], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Two workers that train until they are told to stop."""
    process = subprocess.Popen(
        [*launcher(2), WORKER, "wait", "data_parallel_size=2"],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(folder / "ready_0", folder / "ready_1")
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            for rank in range(2):
                with contextlib.suppress(OSError, ValueError):
                    os.kill(int((folder / f"ready_{rank}").read_text()), signal.SIGTERM)
        process.communicate(timeout=LONGEST_SECONDS)


def of_our_processes(found: list[Listener], folder: Path, launcher: object, root: int) -> list[Listener]:
    """Those of the workers, and of the launcher where it is ours."""
    ours = {int((folder / f"ready_{rank}").read_text()) for rank in range(2)}
    return [one for one in found if one.pid in ours or (launcher is own_launcher and one.pid == root)]


@pytest.mark.slow
@pytest.mark.in_ci
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_machine_listens_on_loopback_alone(launcher: Callable[[int], list[str]], tmp_path: Path) -> None:
    with running(launcher, tmp_path) as process:
        found = of_our_processes(listeners_of(process.pid), tmp_path, launcher, process.pid)
    assert len(found) >= 3, "a store and a socket of each worker"
    assert [one for one in found if not one.is_loopback()] == []


class Payload:
    """Runs a command in whoever unpickles it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.mark}",)


def attack(port: int, mark: Path) -> int:
    """Overwrites every key of a store with a pickle, as it is and in the encoding of torch's rendezvous."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2), wait_for_workers=False)
    names = set(store.list_keys())
    for name in names:
        plain = pickle.dumps(Payload(mark))
        store.set(name, base64.b64encode(plain) if "torch.rendezvous" in name else plain)
    return len(names)


@pytest.mark.slow
@pytest.mark.in_ci
def test_pickles_written_into_the_store_of_a_run_are_not_loaded(tmp_path: Path) -> None:
    """All entries, while the run is at work and its launcher looks after it."""
    mark = tmp_path / "executed"
    with running(own_launcher, tmp_path) as process:
        written = 0
        for port in {one.port for one in listeners_of(process.pid) if one.pid == process.pid}:
            with contextlib.suppress(RuntimeError):
                written += attack(port, mark)
        assert written >= 4
        time.sleep(RENDEZVOUS_SECONDS)
        assert not mark.exists(), "a process of the run executed what a stranger sent"


@pytest.mark.slow
@pytest.mark.in_ci
def test_a_stranger_who_forges_a_failure_ends_the_run_with_words(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    with running(own_launcher, tmp_path) as process:
        (port,) = {one.port for one in listeners_of(process.pid) if one.pid == process.pid}
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2), wait_for_workers=False)
        (signed_in,) = (name for name in store.list_keys() if name.endswith("here/0"))
        store.set(signed_in.removesuffix("here/0") + "failure", pickle.dumps(Payload(mark)))
        said = process.communicate(timeout=LONGEST_SECONDS)[0]
    assert process.returncode == 2
    assert re.search(
        r"onward: the store .* holds b'.* as 'failure', which is not signed with this run's secret",
        said,
    )
    assert said.count("\n") == 1, said
    assert not mark.exists()


@pytest.mark.slow
@pytest.mark.in_ci
def test_rank_0_of_two_nodes_listens_at_its_address_alone(tmp_path: Path) -> None:
    with two_nodes() as nodes:
        port = free_port()
        processes = []
        for rank in range(2):
            variables = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
            variables |= {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
            variables |= {"MASTER_ADDR": nodes.addresses[0], "MASTER_PORT": str(port)}
            command = [sys.executable, WORKER, "wait", "data_parallel_size=2"]
            processes.append(nodes.start(rank, command, tmp_path, variables))
        try:
            wait_for(tmp_path / "ready_0", tmp_path / "ready_1")
            pids = [int((tmp_path / f"ready_{rank}").read_text()) for rank in range(2)]
            found = [{(str(one.address), one.port == port) for one in listeners_of(pid)} for pid in pids]
        finally:
            for process in processes:
                process.send_signal(signal.SIGTERM)
            for process in processes:
                process.communicate(timeout=LONGEST_SECONDS)
    assert found[0] == {(nodes.addresses[0], True), (nodes.addresses[0], False)}
    assert found[1] == {(nodes.addresses[1], False)}


LAYOUTS = [
    pytest.param(2, {"data_parallel_size": 2, "zero_stage": 3}, id="ZeRO 3"),
    pytest.param(2, {"data_parallel_size": 1, "pipeline_parallel_size": 2}, id="pipeline"),
    pytest.param(2, {"data_parallel_size": 1, "horizontal_parallel_size": 2}, id="tensor parallel"),
]


def forbid_unpickling(rank: int) -> None:
    """Lets every collective of objects fail on the rank that receives."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a rank unpickled what another one sent")

    assert callable(distributed_c10d._tensor_to_object)
    distributed_c10d._tensor_to_object = refuse


@pytest.mark.parametrize(("ranks", "sizes"), LAYOUTS)
def test_no_rank_unpickles_what_another_one_sent(ranks: int, sizes: dict[str, int], tmp_path: Path) -> None:
    """From the start over checkpoints and a resume to the trained model, with torch's unpickling made to fail."""
    make_workplace(tmp_path, ranks, steps=80, **sizes)
    for steps in (40, 80):
        options = [f"--training.num_train_steps={steps}", "--learning_rate.warmup_steps=10"]
        life = Life(tmp_path, "out", ranks, True, options, forbid_unpickling)
        wait_until(lambda: life.is_over, LONGEST_SECONDS)  # noqa: B023
        assert life.exit_codes() == [0], life.log()
    assert (tmp_path / "out" / "mlp_trained.onnx").is_file()
    assert len(list((tmp_path / "out" / "checkpoints").iterdir())) == 2


def test_the_guard_sees_collectives_of_objects() -> None:
    """What the test above replaces is what torch's collectives of objects call."""
    with pytest.raises(AssertionError, match="a rank unpickled"):
        run_on_ranks(2, gather_objects_under_guard)


def gather_objects_under_guard() -> None:
    forbid_unpickling(dist.get_rank())
    dist.all_gather_object([None, None], 1)


def test_rank_0_listens_at_the_address_it_was_given() -> None:
    port = free_port()
    store = open_store(
        Launch(
            launcher="Slurm",
            rank=0,
            world_size=2,
            local_rank=0,
            local_size=1,
            master_address="127.0.0.1",
            master_port=port,
        ),
        5.0,
    )
    (found,) = [one for one in listeners_of(os.getpid()) if one.port == port]
    assert str(found.address) == "127.0.0.1"
    store.set("a", "b")
    assert (
        open_store(
            Launch(
                launcher="Slurm",
                rank=1,
                world_size=2,
                local_rank=0,
                local_size=1,
                master_address="127.0.0.1",
                master_port=port,
            ),
            5.0,
        ).get("a")
        == b"b"
    )


def test_the_store_is_bound_to_numeric_addresses_of_this_machine() -> None:
    assert address_to_bind("127.0.0.1") == "127.0.0.1"
    assert address_to_bind("192.0.2.1") is None  # reserved for documentation: no machine has it
    assert address_to_bind(socket.gethostname()) is None
    with listen("127.0.0.1") as listener, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", listener.getsockname()[1])


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        (
            Launch(
                launcher="Slurm",
                rank=0,
                world_size=2,
                local_rank=0,
                local_size=1,
                master_address="127.0.0.1",
                master_port=29511,
            ),
            "rank 0 listens at 127.0.0.1:29511, and every rank at ports",
        ),
        (
            Launch(
                launcher="Slurm",
                rank=0,
                world_size=2,
                local_rank=0,
                local_size=1,
                master_address="gpu1",
                master_port=29511,
            ),
            "rank 0 listens at gpu1:29511 on all interfaces, and every rank",
        ),
        (
            Launch(
                launcher="torchrun",
                rank=0,
                world_size=2,
                local_rank=0,
                local_size=1,
                master_address="10.0.0.1",
                master_port=29511,
                agent_store=True,
            ),
            "torchrun listens at 10.0.0.1:29511 on all interfaces, and every rank at ports that the system chooses",
        ),
    ],
)
def test_a_run_of_several_machines_tells_what_it_opens(launch: Launch, words: str) -> None:
    note = listening_note(launch)
    assert note is not None
    assert note.startswith(words)
    assert note.endswith("Let only the machines of this run reach them; see docs/howto/distributed.md, Ports.")


def test_a_run_of_one_machine_has_nothing_to_report() -> None:
    assert (
        listening_note(
            Launch(
                launcher="Slurm",
                rank=0,
                world_size=2,
                local_rank=0,
                local_size=2,
                master_address="127.0.0.1",
                master_port=29511,
            )
        )
        is None
    )


SECRET = "0123456789abcdef"


@pytest.mark.slow
@pytest.mark.in_ci
@pytest.mark.parametrize("second", [SECRET, SECRET[::-1], ""])
def test_ranks_of_one_run_have_one_secret(second: str, tmp_path: Path) -> None:
    port = str(free_port())
    processes = []
    for rank, secret in enumerate((SECRET, second)):
        variables = {"PMI_RANK": str(rank), "PMI_SIZE": "2", "MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": "2"}
        command = [sys.executable, WORKER, "sum", "data_parallel_size=2", "start_timeout_seconds=20"]
        variables |= {"PMI_JOBID": "7", "MASTER_PORT": port, "ONWARD_SECRET": secret}
        processes.append(
            subprocess.Popen(
                command, cwd=tmp_path, env=environment(**variables), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True,
            )
        )  # fmt: skip
    said = [process.communicate(timeout=LONGEST_SECONDS)[0] for process in processes]
    if second == SECRET:
        assert [process.returncode for process in processes] == [0, 0], said
    else:
        assert processes[1].returncode == 2
        assert "ONWARD_SECRET" in said[1]
        assert processes[0].returncode == 2, said
