"""Which sockets of a tree of processes listen, read from the kernel's tables; Linux only."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

LISTENING, UNCONNECTED = "0A", "07"
"""States in the kernel's tables: of a TCP socket that listens, and of a UDP socket that anybody may send to."""


@dataclass(frozen=True)
class Listener:
    """A socket that strangers can reach: its protocol, address, port and process."""

    protocol: str
    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int
    pid: int

    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        mapped = getattr(self.address, "ipv4_mapped", None)
        return (mapped or self.address).is_loopback


def process_tree(root: int) -> list[int]:
    """A process and everything that it started."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(folder.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def listeners_of(root: int) -> list[Listener]:
    """The listening sockets of a tree of processes."""
    owners: dict[str, int] = {}
    for pid in process_tree(root):
        for entry in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(entry)
            except OSError:
                continue
            if target.startswith("socket:["):
                owners[target[len("socket:[") : -1]] = pid
    found = []
    for protocol, state in (("tcp", LISTENING), ("tcp6", LISTENING), ("udp", UNCONNECTED), ("udp6", UNCONNECTED)):
        for line in Path(f"/proc/{root}/net/{protocol}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state and fields[9] in owners:
                address, _, port = fields[1].partition(":")
                found.append(Listener(protocol, _address(address), int(port, 16), owners[fields[9]]))
    return found


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The kernel writes addresses as 32-bit words in the machine's byte order."""
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    return ipaddress.ip_address(b"".join(words))
