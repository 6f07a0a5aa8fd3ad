"""Which launcher started this process, and what it says: rank, world size, place on the machine, where the ranks meet.

A pure function of the environment variables that torchrun, Open MPI, MPICH and its kin (PMI) and Slurm set.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from onward.errors import ParametersError
from onward.operating_system import starter_of_session

LOOPBACK = "127.0.0.1"
FIRST_PORT, PORTS = 20000, 10000
"""Ports derived from job ids are here: below those that Linux hands out by itself (32768 and up)."""

LAUNCHED_BY_US = "ONWARD_LAUNCHED"
"""Environment variable of workers that `onward train` started itself, and sees end: its process number."""

OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Environment variable of torchrun: with 1, rank 0 opens another store, at another port, in every rendezvous."""

LauncherName = Literal["none", "torchrun", "Open MPI", "PMI", "Slurm"]

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_PMI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_LAST_STEP = 2**32 - 16
"""Slurm numbers what is no `srun` step (batch script, interactive shell) from here up."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a launcher told this process.

    Attributes:
        launcher: who started it; `none`: nobody, it is alone.
        rank, world_size: its number among all processes, and how many there are.
        local_rank, local_size: the same on this machine.
        master_address, master_port: where rank 0 (or torchrun) listens.
        job: the same for all processes of one start, and another for another start.
        agent_store: torchrun itself listens, rather than rank 0.
        restart: how often torchrun has started the processes again.
    """

    launcher: LauncherName = "none"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    master_address: str = LOOPBACK
    master_port: int = 0
    job: str = ""
    agent_store: bool = False
    restart: int = 0

    @property
    def is_one_machine(self) -> bool:
        """Whether all processes are on this machine."""
        return self.local_size == self.world_size


def detect(environment: Mapping[str, str] | None = None) -> Launch:
    """Reads the launcher's variables; the innermost launcher counts where one runs inside of another.

    Raises:
        ParametersError: variables are missing, no numbers, or contradict each other.
    """
    variables = os.environ if environment is None else environment
    around = _read(variables, "Open MPI", _OPEN_MPI) or _read(variables, "PMI", _PMI) or _read_slurm(variables)
    given = [name for name in _TORCHRUN if variables.get(name)]
    if "TORCHELASTIC_RUN_ID" in variables or (given and around is None) or len(given) == len(_TORCHRUN):
        launch = _read(variables, "torchrun", _TORCHRUN)
        if launch is not None:
            if around is not None and around.launcher != "Slurm" and "TORCHELASTIC_RUN_ID" not in variables:
                _check_agree(variables, around)
            return _with_torchrun_store(variables, launch)
    if around is not None:
        # Scripts often hand a part of the launcher's numbers on to torch; what they hand on must be true.
        _check_agree(variables, around)
    return _with_rendezvous_address(variables, around or Launch())


def ranks_on_this_machine() -> int:
    """Of a run that has begun: a caller that made its process group by itself has set no address to rendezvous at."""
    given = os.environ.get("LOCAL_WORLD_SIZE")
    return int(given) if given else detect().local_size


def check_elastic(launch: Launch, environment: Mapping[str, str] | None = None) -> None:
    """Whether the processes of an elastic run find each other again when a node is lost or added.

    torchrun's nodes keep the address of the store that they share at first, also when its node is gone.

    Raises:
        ParametersError: torchrun shares its store.
    """
    variables = os.environ if environment is None else environment
    is_shared = launch.launcher == "torchrun" and LAUNCHED_BY_US not in variables and variables.get(OWN_STORE) != "1"
    if is_shared:
        raise ParametersError(
            "distributed.elastic: torchrun's processes share a store whose address stays the same when its node is "
            f"lost. Start torchrun with the environment variable {OWN_STORE}=1."
        )


def _read(variables: Mapping[str, str], launcher: LauncherName, names: tuple[str, ...]) -> Launch | None:
    """Rank, size, local rank and local size from four variables; None where the first two are absent."""
    present = [name for name in names if variables.get(name, "") != ""]
    if not present or (launcher != "torchrun" and not set(names[:2]) & set(present)):
        return None
    missing = [name for name in names if name not in present]
    if missing:
        raise ParametersError(
            f"{_shown(variables, present)} {'is' if len(present) == 1 else 'are'} set, but not {', '.join(missing)}; "
            f"{launcher} sets all of {', '.join(names)}. Set the missing ones, or unset the others to train in one "
            "process."
        )
    rank, size, local_rank, local_size = (_number(variables, name) for name in names)
    launch = Launch(
        launcher=launcher,
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_size=local_size,
        job=_job(variables, launcher),
    )
    _check_possible(launch, variables, names)
    return launch


def _check_possible(launch: Launch, variables: Mapping[str, str], names: tuple[str, ...]) -> None:
    problems = []
    if launch.rank >= launch.world_size:
        problems.append(f"a rank is below the number of processes, 0 to {launch.world_size - 1}")
    if launch.local_rank >= launch.local_size:
        problems.append(f"a local rank is below the number of processes of the machine, {launch.local_size}")
    if launch.local_size > launch.world_size:
        problems.append("a machine has no more processes than all machines together")
    if problems:
        raise ParametersError(
            f"{_shown(variables, names)} contradict each other: {'; '.join(problems)}. They come from {launch.launcher}"
            ", or were set by hand; unset what was left over from another launch."
        )


def _check_agree(variables: Mapping[str, str], around: Launch) -> None:
    """Variables that torch reads, set by hand under mpirun or srun, must say what mpirun or srun says."""
    said = dict(zip(_TORCHRUN, (around.rank, around.world_size, around.local_rank, around.local_size), strict=True))
    given = [name for name in _TORCHRUN if variables.get(name)]
    if any(_number(variables, name) != said[name] for name in given):
        raise ParametersError(
            f"{_shown(variables, given)} {'is' if len(given) == 1 else 'are'} set, but {around.launcher} says "
            f"{', '.join(f'{name}={said[name]}' for name in given)}. Unset {', '.join(given)}; they seem to be left "
            "over from another launch."
        )


def _with_torchrun_store(variables: Mapping[str, str], launch: Launch) -> Launch:
    address, port = variables.get("MASTER_ADDR"), variables.get("MASTER_PORT")
    if not address or not port:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not variables.get(name)]
        raise ParametersError(
            f"{_shown(variables, _TORCHRUN)} are set, but not {' and '.join(missing)}, where the processes rendezvous. "
            "Start with torchrun, which sets them, or set them to the first machine's address and a free port."
        )
    values = {
        **vars(launch),
        "master_address": address,
        "master_port": _number(variables, "MASTER_PORT"),
        "agent_store": variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        "restart": int(variables.get("TORCHELASTIC_RESTART_COUNT", "0")),
    }
    return Launch(**values)


def _read_slurm(variables: Mapping[str, str]) -> Launch | None:
    """Ranks of a step that `srun` started; a batch script, or a step of one task, is a process alone."""
    step = variables.get("SLURM_STEP_ID", variables.get("SLURM_STEPID", ""))
    if not step.isdigit() or int(step) >= _LAST_STEP:
        return None
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS"
    missing = [name for name in (*names, size_name) if not variables.get(name)]
    if missing:
        raise ParametersError(
            f"SLURM_STEP_ID={step} is set, but not {', '.join(missing)}, which srun sets. Start the processes with "
            "srun, or unset SLURM_STEP_ID to train in one process."
        )
    size = _number(variables, size_name)
    if size == 1:
        return None
    tasks_name = "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in variables else "SLURM_TASKS_PER_NODE"
    tasks = _tasks_per_node(variables.get(tasks_name, str(size)))
    node = _number(variables, "SLURM_NODEID")
    if node >= len(tasks) or sum(tasks) != size:
        raise ParametersError(
            f"{_shown(variables, ('SLURM_NODEID', size_name, tasks_name))} contradict each other: {len(tasks)} nodes "
            f"with {sum(tasks)} tasks. They come from srun, or were set by hand."
        )
    rank, local_rank = (_number(variables, name) for name in names[:2])
    launch = Launch(
        launcher="Slurm",
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_size=tasks[node],
        job=_job(variables, "Slurm"),
    )
    _check_possible(launch, variables, ("SLURM_PROCID", size_name, "SLURM_LOCALID", tasks_name))
    return launch


def _with_rendezvous_address(variables: Mapping[str, str], launch: Launch) -> Launch:
    """Where rank 0 listens: on the loopback interface of the only machine, as said, or on the first of Slurm's list."""
    if launch.world_size == 1:
        return launch
    address = LOOPBACK if launch.is_one_machine else variables.get("MASTER_ADDR")
    nodes = (
        variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or variables.get("SLURM_NODELIST")
    )
    if not address and nodes:
        address = first_host(nodes)
    if not address:
        raise ParametersError(
            f"{launch.launcher} started {launch.world_size} processes on several machines ({launch.local_size} on "
            "this one), and gives no rendezvous address. Set MASTER_ADDR to the address of the machine of rank "
            "0 on all of them (mpirun -x MASTER_ADDR=HOST for Open MPI, -genv MASTER_ADDR HOST for MPICH)."
        )
    port = _number(variables, "MASTER_PORT") if variables.get("MASTER_PORT") else derived_port(launch.job)
    return Launch(**{**vars(launch), "master_address": address, "master_port": port})


def derived_port(job: str) -> int:
    """A port that all processes of a job find by themselves, and that another job hardly has."""
    return FIRST_PORT + zlib.crc32(job.encode()) % PORTS


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu[07-09,12],login1` -> `gpu07`."""
    outside = re.sub(r"\[[^\]]*\]", lambda found: found.group().replace(",", " "), nodes)
    first = outside.split(",")[0]
    return re.sub(r"\[([^\] \-]*)[^\]]*\]", r"\1", first).strip()


def _tasks_per_node(text: str) -> list[int]:
    """Slurm's `2(x3),1` -> [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            raise ParametersError(f"Slurm's tasks per node are {text!r}; expected counts such as 2(x3),1.")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _job(variables: Mapping[str, str], launcher: LauncherName) -> str:
    """What tells this start from another one on the same machines."""
    if launcher == "torchrun":
        return variables.get("TORCHELASTIC_RUN_ID", "")
    names = {
        "Open MPI": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        "PMI": ("PMI_JOBID", "PMI_KVSNAME"),
        "Slurm": (),
        "none": (),
    }[launcher]
    slurm = [variables[name] for name in ("SLURM_JOB_ID", "SLURM_STEP_ID") if variables.get(name)]
    given = next(([variables[name]] for name in names if variables.get(name)), slurm)
    return ".".join(given) or f"process {starter_of_session()}"


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables[name]
    if not text.strip().isdigit():
        raise ParametersError(f"the environment variable {name} is {text!r}; expected a whole number from 0.")
    return int(text)


def _shown(variables: Mapping[str, str], names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(f"{name}={variables[name]}" for name in names if name in variables)


def is_first_rank() -> bool:
    """Whether this process is rank 0, or alone; found out without importing anything slow."""
    ranks = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
    return all(os.environ.get(name, "0") == "0" for name in ranks)
