"""Where the processes of a run find each other: one key-value store, and a roll call through it.

torchrun brings its own store; elsewhere rank 0 opens one at the address that the launcher's variables lead to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from onward.deadline import Deadline
from onward.errors import OnwardError, ParametersError
from onward.operating_system import interface_with_address, is_running, process_namespace
from onward.parallel.rendezvous.launcher import LAUNCHED_BY_US, Launch
from onward.parallel.rendezvous.listening import address_to_bind, listen, serve_store, stay_on_loopback
from onward.parallel.rendezvous.run_store import ForeignEntryError, RunStore, secret_of
from onward.spelling import shortened

POLL_SECONDS = 0.05
LONGEST_POLL_SECONDS = 1.0
CONNECT_SECONDS = 5.0
"""How long torch may take for one attempt to connect to a store that is listening."""


class StrayError(ParametersError):
    """This process met the ranks of another start, which its end does not concern."""


class UnreachableStoreError(ParametersError):
    """The store of this start does not answer, so that this process cannot report its end to other ranks."""


@dataclass(frozen=True)
class PeerInfo:
    """Who a rank is: host, process number, and the namespace (container) in which that number counts."""

    host: str
    pid: int
    namespace: int

    def __str__(self) -> str:
        return f"{self.host}, process {self.pid}"

    def is_near(self) -> bool:
        """Whether its process number means that process here, too."""
        return self.host == socket.gethostname() and self.namespace == process_namespace()


def peer_info(store: RunStore, rank: int) -> PeerInfo:
    """Who came as a rank that has signed in.

    Raises:
        ForeignEntryError: somebody else wrote there.
    """
    return _parse_peer_info(rank, store.get(f"here/{rank}"))


def _parse_peer_info(rank: int, content: bytes) -> PeerInfo:
    try:
        host, pid, namespace = json.loads(content)
        return PeerInfo(str(host), int(pid), int(namespace))
    except (ValueError, TypeError, RecursionError):
        raise ForeignEntryError(f"here/{rank}", content) from None


def open_store(launch: Launch, timeout_seconds: float) -> RunStore:
    """A connection to the store of this start; rank 0 opens the store itself unless torchrun has.

    Raises:
        ParametersError: the port is taken.
        UnreachableStoreError: nothing answers within the timeout.
    """
    hosts = launch.rank == 0 and not launch.agent_store
    place = f"{launch.master_address}:{launch.master_port}"
    started = time.monotonic()
    address, secret = address_to_bind(launch.master_address) if hosts else None, secret_of()
    try:
        store: Store
        if address is not None:
            store = serve_store(listen(address, launch.master_port), timeout_seconds)
        else:
            store = _connect(launch, timeout_seconds) if not hosts else _client(launch, timeout_seconds, is_master=True)
    except (OSError, dist.DistNetworkError, dist.DistStoreError) as error:
        if hosts:
            raise ParametersError(
                f"rank 0 cannot listen at port {launch.master_port}, where the others look for it: "
                f"{_first_line(error)}. Set MASTER_PORT to a free port on all machines."
            ) from None
        owner = "torchrun" if launch.agent_store else "rank 0"
        raise UnreachableStoreError(
            f"rank {launch.rank} of {launch.world_size} on {socket.gethostname()} waited "
            f"{time.monotonic() - started:.0f} s for {owner} at {place}, and nothing answered. Check that the first "
            "process runs, that the address is reachable from here and the port open (MASTER_ADDR, MASTER_PORT), or "
            "raise distributed.start_timeout_seconds."
        ) from None
    # Nodes that came at different times count different restarts; where rank 0 opens a store, that is of one start.
    return RunStore(store, f"onward/{launch.restart if launch.agent_store else 0}", secret)


def _connect(launch: Launch, timeout_seconds: float) -> TCPStore:
    """A client of the store that another process serves, or will serve within the timeout.

    torch's client exceeds its timeout up to four times where nothing listens, so it is used for short attempts only.
    """
    deadline, pause = Deadline(timeout_seconds), POLL_SECONDS
    while True:
        _check_launcher()
        attempt = min(CONNECT_SECONDS, timeout_seconds)
        try:
            socket.create_connection((launch.master_address, launch.master_port), attempt).close()
            store = _client(launch, attempt)
        except (OSError, dist.DistNetworkError, dist.DistStoreError):
            if deadline.left_seconds <= pause:
                raise
            deadline.pause(pause)
            pause = min(2 * pause, LONGEST_POLL_SECONDS)
        else:
            store.set_timeout(timedelta(seconds=timeout_seconds))
            return store


def _client(launch: Launch, timeout_seconds: float, is_master: bool = False) -> TCPStore:
    return TCPStore(
        launch.master_address,
        launch.master_port,
        launch.world_size,
        is_master=is_master,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
    )


def _check_launcher() -> None:
    """A worker whose launcher was killed while it was starting would look for the store until the timeout.

    Raises:
        OnwardError: that is so.
    """
    launcher = os.environ.get(LAUNCHED_BY_US)
    if launcher is not None and not is_running(int(launcher)):
        raise OnwardError(f"onward train (process {launcher}), which started this process, is gone.")


def rendezvous(launch: Launch, timeout_seconds: float) -> RunStore:
    """Opens the store and signs in as a rank.

    Raises:
        OnwardError: the launcher was killed while this worker was starting.
        ParametersError: nothing answers, the port is taken, or the rank is there already.
        StrayError: the others belong to another start.
    """
    _check_launcher()
    store = open_store(launch, timeout_seconds)
    _sign_in(store, launch)
    return store


def wait_for_all(store: RunStore, launch: Launch, timeout_seconds: float) -> None:
    """Waits until every rank has signed in; whoever fails meanwhile, the watch will say.

    Raises:
        ParametersError: not all came in time.
    """
    deadline = Deadline(timeout_seconds)
    names = [f"here/{rank}" for rank in range(launch.world_size)]
    while True:
        present = [rank for rank, name in enumerate(names) if store.check([name])]
        if len(present) == launch.world_size:
            return
        if deadline.is_over:
            raise ParametersError(_roll(store, launch, present, deadline.waited_seconds))
        deadline.pause(POLL_SECONDS)


def _sign_in(store: RunStore, launch: Launch) -> None:
    me = PeerInfo(socket.gethostname(), os.getpid(), process_namespace())
    job = f"{launch.world_size} processes, {launch.launcher} job {launch.job!r}"
    # The owner of the store says whose it is; a stray that comes first must not. torchrun's store is its own start's.
    speaks = launch.rank == 0 or launch.agent_store
    first = (store.compare_set("job", "", job) if speaks else store.get("job")).decode(errors="replace")
    if first != job:
        raise StrayError(
            f"rank {launch.rank} ({me}) belongs to a start of {job}, but at {launch.master_address}:"
            f"{launch.master_port} meets a start of {first}. Set MASTER_PORT to another free port for one of the two."
        )
    written = json.dumps(dataclasses.astuple(me))
    seen = store.compare_set(f"here/{launch.rank}", "", written)
    if seen != written.encode():
        other = _parse_peer_info(launch.rank, seen)
        raise ParametersError(
            f"rank {launch.rank} exists twice: {other}; and {me}. Give every process its own rank, and every launch "
            "its own MASTER_PORT."
        )


def _roll(store: RunStore, launch: Launch, present: list[int], waited: float) -> str:
    hosts: dict[str, list[int]] = {}
    for rank in present:
        hosts.setdefault(peer_info(store, rank).host, []).append(rank)
    missing = [rank for rank in range(launch.world_size) if rank not in present]
    came = "; ".join(f"{name_ranks(ranks)} on {host}" for host, ranks in hosts.items())
    return (
        f"waited {waited:.0f} s for {launch.world_size} processes; {len(present)} came ({came}), {name_ranks(missing)} "
        "did not. Check the output of their machines, check that all of them were started with the same sizes, or "
        "raise distributed.start_timeout_seconds."
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1, 2`; long lists cut short."""
    return f"rank{'' if len(ranks) == 1 else 's'} {shortened(map(str, ranks), 16)}"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def choose_interface(launch: Launch) -> None:
    """Keeps the processes of one machine on its loopback interface, unless the user names another one.

    On several machines, tells Gloo which network leads to the meeting point; by itself it trusts the host's name, which
    is often wrong.
    """
    if launch.is_one_machine:
        variables: dict[str, str] = {}
        stay_on_loopback(variables)
        for name, value in variables.items():
            os.environ.setdefault(name, value)
        return
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((launch.master_address, launch.master_port))  # of a datagram: chooses a route, sends nothing
        interface = interface_with_address(probe.getsockname()[0])
        if interface is not None and not interface.startswith("lo"):
            os.environ["GLOO_SOCKET_IFNAME"] = interface
