"""Which launcher started a process, from the variables that each of them sets; contradictions are refused by name."""

from __future__ import annotations

import pytest

from onward.errors import ParametersError
from onward.parallel.rendezvous.launcher import (
    FIRST_PORT,
    PORTS,
    Launch,
    check_elastic,
    derived_port,
    detect,
    first_host,
)

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "gpu1",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_MCA_ess_base_jobid": "1969618945",
}  # fmt: skip
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "8"}
SLURM = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "6", "SLURM_LOCALID": "2", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "9", "SLURM_NTASKS": "9", "SLURM_STEP_TASKS_PER_NODE": "4(x2),1",
    "SLURM_STEP_NODELIST": "gpu[07-08,12]",
}  # fmt: skip


def test_alone() -> None:
    assert detect({}) == Launch(launcher="none", rank=0, world_size=1, local_rank=0, local_size=1)


def test_torchrun() -> None:
    launch = detect(TORCHRUN)
    assert launch == Launch(
        launcher="torchrun",
        rank=5,
        world_size=8,
        local_rank=1,
        local_size=4,
        master_address="gpu1",
        master_port=29500,
        job="abc",
        agent_store=True,
        restart=2,
    )


def test_an_elastic_run_needs_a_store_that_outlives_a_node() -> None:
    with pytest.raises(ParametersError) as caught:
        check_elastic(detect(TORCHRUN), TORCHRUN)
    assert str(caught.value) == (
        "distributed.elastic: torchrun's processes share a store whose address stays the same when its node is lost. "
        "Start torchrun with the environment variable TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."
    )
    for variables in ({**TORCHRUN, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, {**TORCHRUN, "ONWARD_LAUNCHED": "7"}):
        check_elastic(detect(variables), variables)
    check_elastic(detect(OPEN_MPI), OPEN_MPI)


def test_open_mpi_on_one_machine_meets_at_a_port_of_its_job() -> None:
    launch = detect(OPEN_MPI)
    assert (launch.launcher, launch.rank, launch.world_size, launch.local_rank, launch.local_size) == (
        "Open MPI", 1, 4, 1, 4,
    )  # fmt: skip
    assert launch.master_address == "127.0.0.1"
    assert FIRST_PORT <= launch.master_port < FIRST_PORT + PORTS
    other = detect(OPEN_MPI | {"OMPI_MCA_ess_base_jobid": "1969618946"})
    assert other.master_port != launch.master_port
    assert detect(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "3"}).master_port == launch.master_port


def test_pmi() -> None:
    launch = detect(PMI)
    assert (launch.launcher, launch.rank, launch.world_size, launch.local_rank) == ("PMI", 1, 2, 1)
    assert launch.job == detect(PMI | {"PMI_RANK": "0"}).job != ""


def test_slurm_step_over_three_nodes() -> None:
    launch = detect(SLURM)
    assert (launch.launcher, launch.rank, launch.world_size, launch.local_rank, launch.local_size) == (
        "Slurm", 6, 9, 2, 4,
    )  # fmt: skip
    assert launch.master_address == "gpu07"
    assert launch.job == "4711.0"
    assert launch.master_port == derived_port("4711.0")
    last = detect(SLURM | {"SLURM_PROCID": "8", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"})
    assert last.local_size == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": ""},
        {"SLURM_STEP_ID": "4294967291"},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    ],
    ids=["batch script", "batch step", "step of one task"],
)
def test_slurm_job_without_a_step_of_several_tasks_is_a_process_alone(changes: dict[str, str]) -> None:
    assert detect(SLURM | changes).launcher == "none"


def test_torchrun_inside_of_srun_and_mpirun_counts() -> None:
    assert detect(SLURM | TORCHRUN).launcher == "torchrun"
    assert detect(OPEN_MPI | TORCHRUN).rank == 5


def test_mpirun_inside_of_a_slurm_job_meets_on_its_first_node() -> None:
    launch = detect(SLURM | OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    assert (launch.launcher, launch.rank, launch.master_address) == ("Open MPI", 1, "gpu07")


def test_address_and_port_that_are_given_count() -> None:
    launch = detect(SLURM | {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234"})
    assert (launch.master_address, launch.master_port) == ("10.0.0.7", 1234)


def test_part_of_torchs_variables_handed_on_from_the_launcher() -> None:
    assert detect(SLURM | {"RANK": "6", "WORLD_SIZE": "9", "LOCAL_RANK": "2"}).launcher == "Slurm"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("login1,gpu[07-09]", "login1"),
        ("rack[2-3]-node[001,005]", "rack2-node001"),
        ("a1-b,c", "a1-b"),
        ("10.0.0.1,10.0.0.2", "10.0.0.1"),
    ],
)
def test_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, ["RANK=1, WORLD_SIZE=2 are set, but not LOCAL_RANK, LOCAL_WORLD_SIZE"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2 is set, but not RANK", "unset the others"]),
        (TORCHRUN | {"MASTER_PORT": ""}, ["but not MASTER_PORT"]),
        (TORCHRUN | {"RANK": "two"}, ["RANK is 'two'; expected a whole number"]),
        (TORCHRUN | {"RANK": "8"}, ["RANK=8, WORLD_SIZE=8", "0 to 7"]),
        (TORCHRUN | {"LOCAL_RANK": "4"}, ["LOCAL_RANK=4, LOCAL_WORLD_SIZE=4", "local rank"]),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, ["no more processes than all machines"]),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": ""}, ["OMPI_COMM_WORLD_RANK=1", "not OMPI_COMM_WORLD_SIZE"]),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, ["several machines (2 on this one)", "MASTER_ADDR", "-x"]),
        (
            OPEN_MPI | {"RANK": "0", "WORLD_SIZE": "4"},
            ["RANK=0, WORLD_SIZE=4 are set, but Open MPI says RANK=1, WORLD_SIZE=4", "Unset RANK"],
        ),
        ({**PMI, "MPI_LOCALRANKID": ""}, ["PMI_RANK=1, PMI_SIZE=2", "not MPI_LOCALRANKID"]),
        (SLURM | {"SLURM_LOCALID": ""}, ["SLURM_STEP_ID=0 is set, but not SLURM_LOCALID"]),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4,4"}, ["SLURM_STEP_NUM_TASKS=9", "2 nodes with 8 tasks"]),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "many"}, ["'many'", "2(x3),1"]),
        (SLURM | {"RANK": "1"}, ["RANK=1 is set, but Slurm says RANK=6"]),
    ],
)
def test_impossible_variables_are_refused_with_names_and_values(environment: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ParametersError) as caught:
        detect(environment)
    for word in words:
        assert word in str(caught.value)
