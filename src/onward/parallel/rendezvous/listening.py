"""Where processes of a run listen, and who can reach that: the loopback interface where all of them are on one machine.

torch's key-value store by itself listens on all interfaces; here it gets a socket that is bound to one address.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import MutableMapping
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from onward.operating_system import interface_with_address
from onward.parallel.rendezvous.launcher import LOOPBACK, Launch

_WAITING_CONNECTIONS = 2048
"""That the kernel keeps until the store accepts them: a large job connects all at once."""


def listen(address: str, port: int = 0) -> socket.socket:
    """A socket that listens at one address alone; port 0: any free one. OSError goes through."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_WAITING_CONNECTIONS)
    except OSError:
        listener.close()
        raise
    return listener


def serve_store(listener: socket.socket, timeout_seconds: float) -> TCPStore:
    """A store that others reach through a listening socket, which becomes the store's."""
    address, port = listener.getsockname()[:2]
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def address_to_bind(master_address: str) -> str | None:
    """The address that the store can be bound to; None: only all interfaces will do.

    A name may resolve to different addresses on different machines; a numeric address is the one that all others use.
    """
    try:
        ipaddress.ip_address(master_address)
        with listen(master_address):
            return master_address
    except (ValueError, OSError):
        return None


def stay_on_loopback(environment: MutableMapping[str, str]) -> None:
    """Variables that bind what NCCL and Gloo open to loopback, for processes that are all on one machine."""
    interface = interface_with_address(LOOPBACK)
    if interface is not None:
        environment["GLOO_SOCKET_IFNAME"] = interface
        # NCCL by itself prefers any other interface, for its rendezvous and where ranks share no memory.
        environment["NCCL_SOCKET_IFNAME"] = f"={interface}"


def listening_note(launch: Launch) -> str | None:
    """What a run on several machines opens to the network, for the person who starts it; None on one machine."""
    if launch.is_one_machine:
        return None
    place = f"{launch.master_address}:{launch.master_port}"
    if launch.agent_store:
        owner = f"torchrun listens at {place} on all interfaces"
    elif address_to_bind(launch.master_address) is None:
        owner = f"rank 0 listens at {place} on all interfaces"
    else:
        owner = f"rank 0 listens at {place}"
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    return (
        f"{owner}, and every rank at ports that the system chooses{f' on {interface}' if interface else ''}, without "
        "authentication or encryption. Let only the machines of this run reach them; see docs/howto/distributed.md, "
        "Ports."
    )
