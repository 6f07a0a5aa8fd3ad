"""Processes as launchers start them for real: they find each other, and one failure ends all, once and soon."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from onward.operating_system import is_running
from onward.parallel.rendezvous.launcher import Launch
from onward.parallel.rendezvous.rendezvous import open_store
from tests.parallel.starting import (
    LONGEST_SECONDS,
    WORKER,
    environment,
    free_port,
    mpich,
    mpirun,
    needs_mpich,
    needs_mpirun,
    own_launcher,
    run,
    torchrun,
    two_nodes,
    wait_for,
)

LAUNCHERS = [
    pytest.param(torchrun, id="torchrun"),
    pytest.param(mpirun, id="mpirun", marks=needs_mpirun),
    pytest.param(own_launcher, id="onward"),
]
SOON_SECONDS = 90.0
"""Start, failure and end together, on a machine that may be busy; no timeout of the run's own ends it so soon."""


def by_environment(
    variables: Sequence[Mapping[str, str]], folder: Path, *arguments: str
) -> list[subprocess.Popen[str]]:
    """One process per set of variables, as a launcher that is not installed here would start them."""
    return [
        subprocess.Popen(
            [sys.executable, WORKER, *arguments],
            cwd=folder,
            env=environment(**one),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for one in variables
    ]


def slurm(rank: int, size: int, nodes: str = "localhost", tasks: str = "", node: int = 0) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3", "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_LOCALID": str(0 if tasks else rank), "SLURM_NODEID": str(node), "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": tasks or str(size),
    }  # fmt: skip


def outputs(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    try:
        return [process.communicate(timeout=LONGEST_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


# ---------------------------------------------------------------------- starting


@pytest.mark.slow
@pytest.mark.in_ci
@pytest.mark.parametrize("launcher", [*LAUNCHERS, pytest.param(mpich, id="mpich", marks=needs_mpich)])
def test_processes_find_each_other(launcher: object, tmp_path: Path) -> None:
    done = run([*launcher(2), WORKER, "sum", "data_parallel_size=2"], tmp_path)  # type: ignore[operator]
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "rank 0 of 2 at Place(data=0, horizontal=0, pipeline=0) has 3",
        "rank 1 of 2 at Place(data=1, horizontal=0, pipeline=0) has 3",
    ]


@pytest.mark.slow
@pytest.mark.in_ci
@pytest.mark.parametrize("kind", ["Slurm", "PMI"])
def test_processes_find_each_other_by_the_variables_of(kind: str, tmp_path: Path) -> None:
    port = str(free_port())
    if kind == "Slurm":
        variables = [slurm(rank, 2) | {"MASTER_PORT": port} for rank in range(2)]
    else:
        variables = [
            {"PMI_RANK": str(rank), "PMI_SIZE": "2", "MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": "2"}
            | {"MASTER_PORT": port}
            for rank in range(2)
        ]
    said = outputs(by_environment(variables, tmp_path, "sum", "pipeline_parallel_size=2"))
    for rank in range(2):
        assert f"rank {rank} of 2 at Place(data=0, horizontal=0, pipeline={rank}) has 3\n" in said[rank]


@pytest.mark.slow
@pytest.mark.in_ci
def test_two_nodes_of_torchrun(tmp_path: Path) -> None:
    with two_nodes() as nodes:
        place = ["--nnodes", "2", "--master-addr", nodes.addresses[0], "--master-port", "29511"]
        processes = [
            nodes.start(
                node,
                [
                    *torchrun(2, *place, "--node-rank", str(node)),
                    WORKER,
                    "sum",
                    "data_parallel_size=2",
                    "pipeline_parallel_size=2",
                ],
                tmp_path,
            )
            for node in range(2)
        ]
        said = "".join(outputs(processes))
    assert [process.returncode for process in processes] == [0, 0], said
    assert len(re.findall(r"rank \d of 4 at Place\(.*\) has 10\n", said)) == 4


@pytest.mark.slow
@pytest.mark.in_ci
def test_two_nodes_of_slurm_by_environment(tmp_path: Path) -> None:
    with two_nodes() as nodes:
        processes = [
            nodes.start(
                rank,
                [sys.executable, WORKER, "sum", "horizontal_parallel_size=2"],
                tmp_path,
                slurm(rank, 2, ",".join(nodes.addresses), "1(x2)", rank),
            )
            for rank in range(2)
        ]
        said = outputs(processes)
    for rank in range(2):
        assert f"rank {rank} of 2 at Place(data=0, horizontal={rank}, pipeline=0) has 3\n" in said[rank]


@pytest.mark.slow
def test_process_that_stays_away_is_named(tmp_path: Path) -> None:
    command = [*torchrun(2), WORKER, "stay-away", "data_parallel_size=2", "start_timeout_seconds=3"]
    done = run(command, tmp_path)
    assert done.returncode != 0
    assert re.search(r"onward: waited 3 s for 2 processes; 1 came \(rank 0 on .*\), rank 1 did not", done.stderr)


@pytest.mark.slow
def test_all_that_came_end_at_once_when_the_first_has_waited_long_enough(tmp_path: Path) -> None:
    """Rank 0 holds the meeting point itself; the other one would wait for much longer."""
    port = str(free_port())
    processes = []
    for rank, seconds in ((0, 3), (2, 600)):
        options = ["data_parallel_size=3", f"start_timeout_seconds={seconds}"]
        processes += by_environment([slurm(rank, 3) | {"MASTER_PORT": port}], tmp_path, "sum", *options)
    said = outputs(processes)
    assert [process.returncode for process in processes] == [2, 2], said
    assert re.search(r"^onward: waited 3 s for 3 processes; .*\nThis was rank 0 of 3 on \S+; all end\.\n$", said[0])
    assert said[1] == ""


@pytest.mark.slow
def test_a_stray_rank_of_another_start_ends_alone(tmp_path: Path) -> None:
    """It meets a run at work, whose port it was given by mistake."""
    port = free_port()
    variables = [slurm(rank, 2) | {"MASTER_PORT": str(port)} for rank in range(2)]
    running = by_environment(variables, tmp_path, "wait", "data_parallel_size=2")
    wait_for(tmp_path / "ready_0", tmp_path / "ready_1")
    stray = by_environment([variables[1] | {"SLURM_STEP_ID": "4"}], tmp_path, "wait", "data_parallel_size=2")
    said = outputs(stray)[0]
    assert stray[0].returncode == 2
    assert re.search(
        r"onward: rank 1 .* belongs to a start of 2 processes, Slurm job '12\.4', but .* job '12\.3'", said
    )
    store = open_store(
        Launch(
            launcher="Slurm",
            rank=1,
            world_size=2,
            local_rank=1,
            local_size=2,
            master_address="localhost",
            master_port=port,
            job="12.3",
        ),
        LONGEST_SECONDS,
    )
    assert not store.check(["failure"])
    running[0].send_signal(signal.SIGTERM)
    said = "".join(outputs(running))
    assert [process.returncode for process in running] == [3, 3], said


# ---------------------------------------------------------------------- failing


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    ("what", "exit_code", "words"),
    [
        ("fail", 2, r"onward: the shard lies\.\nThis was rank 1 of 3 on \S+; all end\."),
        ("fail-before", 2, r"onward: the shard lies\.\nThis was rank 1 of 3 on \S+; all end\."),
        ("crash", 1, r"ZeroDivisionError: a bug\nThis was rank 1 of 3 on \S+; all end\."),
        ("differ", 2, r"model: 0{16}\.\.\. on rank 0, 1{16}\.\.\. on rank 1, 2{16}\.\.\. on rank 2\."),
    ],
)
def test_failure_of_one_rank_ends_all_and_is_shown_once(
    launcher: object, what: str, exit_code: int, words: str, tmp_path: Path
) -> None:
    command = [*launcher(3), WORKER, what, "data_parallel_size=3"]  # type: ignore[operator]
    done = run(command, tmp_path, SOON_SECONDS)
    assert len(re.findall(words, done.stderr)) == 1, done.stderr
    # torchrun itself ends with 1 whatever its workers say.
    assert done.returncode == (1 if launcher is torchrun else exit_code)
    if launcher is own_launcher:
        assert len(done.stderr.splitlines()) < (20 if what == "crash" else 3), done.stderr


@pytest.mark.slow
@pytest.mark.in_ci
@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        pytest.param(torchrun, r"Signal 9 \(SIGKILL\) received", id="torchrun"),
        pytest.param(mpirun, r"exited on signal 9", id="mpirun", marks=needs_mpirun),
        pytest.param(
            own_launcher, r"^onward train: rank 1 of 3 \(process \d+\) was ended by SIGKILL; all ranks end", id="onward"
        ),
    ],
)
def test_killed_rank_ends_all(launcher: object, words: str, tmp_path: Path) -> None:
    done = run([*launcher(3), WORKER, "kill", "data_parallel_size=3"], tmp_path, SOON_SECONDS)  # type: ignore[operator]
    assert done.returncode not in (0, 2, 3)
    assert len(re.findall(words, done.stderr)) == 1, done.stderr


@pytest.mark.slow
@pytest.mark.in_ci
def test_torchrun_starts_all_again_after_one_was_killed(tmp_path: Path) -> None:
    command = [*torchrun(2, "--max-restarts", "1"), WORKER, "kill-once", "data_parallel_size=2"]
    done = run(command, tmp_path, 2 * SOON_SECONDS)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^rank \d of 2 .* has 3$", done.stdout, re.MULTILINE)) == 2


@pytest.mark.slow
@pytest.mark.in_ci
def test_killed_rank_ends_all_where_no_launcher_looks_after_them(tmp_path: Path) -> None:
    port = str(free_port())
    variables = [slurm(rank, 3) | {"MASTER_PORT": port} for rank in range(3)]
    processes = by_environment(variables, tmp_path, "kill", "data_parallel_size=3")
    said = outputs(processes)
    assert [process.returncode for process in processes] == [1, -signal.SIGKILL, 1]
    assert "".join(said).count("onward: rank 1 (") == 1
    assert "died without an error message: killed by a signal" in said[0] + said[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("hang", r"Rank 1 did not join it \(rank 1 after 3 updates\): the process is alive and does something else"),
        (
            "hang-in-c",
            r"No heartbeat from rank 1 \(rank 1 on \S+, process \d+, which is asleep\): stopped, dead",
        ),
        (
            "freeze",
            r"No heartbeat from rank 1 \(rank 1 on \S+, process \d+, which is stopped by a signal \(SIGSTOP\); ",
        ),
    ],
)
def test_hanging_rank_is_ended_by_the_timeout_named_and_recorded(what: str, words: str, tmp_path: Path) -> None:
    port = str(free_port())
    variables = [slurm(rank, 3) | {"MASTER_PORT": port} for rank in range(3)]
    processes = by_environment(variables, tmp_path, what, "data_parallel_size=3", "timeout_seconds=3")
    said = outputs(processes)
    assert [process.returncode for process in processes] == [1, 1, 1]
    shown = "".join(said)
    assert len(re.findall(r"waited 3 s \(distributed\.timeout_seconds\) in a collective for another rank", shown)) == 1
    assert len(re.findall(words, shown)) == 1, shown
    (file,) = tmp_path.glob("hang_*.txt")
    assert shown.count(f"What every rank was doing (stacks, last collectives, updates): {file.name}") == 1
    check_record(file.read_text(), what)


def check_record(record: str, what: str) -> None:
    """Of three ranks, two of which wait for the second in the fourth update."""
    for rank in (0, 2):
        assert re.search(rf"rank {rank} after 3 updates; last collective: gloo:all_reduce number 4 of .* ago", record)
    ranks = re.split(r"^=+ rank \d \(.*\)$", record, flags=re.MULTILINE)[1:]
    assert len(ranks) == 3
    for rank in (0, 2):
        assert "dist.all_reduce(total, group=group)" in ranks[rank], ranks[rank]
    if what == "hang":
        assert re.search(r'worker.py", line \d+, in misbehave\n\s+time.sleep\(600\)', ranks[1]), ranks[1]
        assert re.search(r"gloo:all_reduce number [34] of .*: over", ranks[1])
    if what == "hang-in-c":
        assert re.search(r"no answer; process \d+ is asleep; its stacks, which C code wrote:", ranks[1]), ranks[1]
        assert re.search(r'worker.py", line \d+ in misbehave', ranks[1]), ranks[1]
    if what == "freeze":
        assert re.search(r"no answer; process \d+ is stopped by a signal", ranks[1]), ranks[1]


@pytest.mark.slow
def test_cut_cable_ends_both_nodes(tmp_path: Path) -> None:
    with two_nodes() as nodes:
        variables = [slurm(rank, 2, ",".join(nodes.addresses), "1(x2)", rank) for rank in range(2)]
        command = [sys.executable, WORKER, "wait", "data_parallel_size=2", "timeout_seconds=4"]
        processes = [nodes.start(rank, command, tmp_path, variables[rank]) for rank in range(2)]
        wait_for(tmp_path / "ready_0", tmp_path / "ready_1")
        nodes.cut_cable()
        said = outputs(processes)
    assert [process.returncode for process in processes] == [1, 1]
    assert "No heartbeat from rank 1 (rank 1 on node1, process" in said[0]
    assert "rank 0 is gone" in said[1] or "waited 4 s" in said[1]


@pytest.mark.slow
def test_rank_that_dies_on_another_node_in_start_up_ends_the_rest_in_half_a_minute(tmp_path: Path) -> None:
    """No collective fails, and no launcher looks after it."""
    with two_nodes() as nodes:
        variables = [slurm(rank, 2, ",".join(nodes.addresses), "1(x2)", rank) for rank in range(2)]
        command = [sys.executable, WORKER, "kill-in-start-up", "data_parallel_size=2"]
        processes = [nodes.start(rank, command, tmp_path, variables[rank]) for rank in range(2)]
        processes[1].wait(timeout=LONGEST_SECONDS)
        died = time.monotonic()
        said = outputs(processes)
    assert time.monotonic() - died < 31
    assert [process.returncode for process in processes] == [1, -signal.SIGKILL]
    assert re.search(r"rank 1 \(node1, process \d+\) has sent no heartbeat for 2[5-9] s: dead, or unreach", said[0])


# ---------------------------------------------------------------------- stopping


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "number"), [("launcher", signal.SIGINT), ("launcher", signal.SIGTERM), ("rank 2", signal.SIGTERM)]
)
def test_signal_saves_on_all_ranks_after_the_same_update(who: str, number: signal.Signals, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*own_launcher(3), WORKER, "wait", "data_parallel_size=3"],
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    ready = [tmp_path / f"ready_{rank}" for rank in range(3)]
    wait_for(*ready)
    os.kill(process.pid if who == "launcher" else int(ready[2].read_text()), number)
    _, said = process.communicate(timeout=LONGEST_SECONDS)
    assert process.returncode == 3
    saved = {(tmp_path / f"saved_{rank}").read_text() for rank in range(3)}
    assert len(saved) == 1
    assert said == f"onward: stopped after update {saved.pop()}.\n"


@pytest.mark.slow
@pytest.mark.in_ci
def test_workers_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*own_launcher(2), WORKER, "wait", "data_parallel_size=2"],
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
    )
    ready = [tmp_path / f"ready_{rank}" for rank in range(2)]
    wait_for(*ready)
    process.kill()
    said = process.communicate()[1].decode()  # ends with the last worker
    assert "onward: rank 0 of 2" in said
    assert "onward train, which started the processes, is gone" in said
    for file in ready:
        assert not is_running(int(file.read_text()))
