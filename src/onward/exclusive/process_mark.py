"""Which process wrote something: its machine, its number and when it was started, so that a number that the operating
system gave to another process later is not mistaken for it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from onward.operating_system import is_running, machine_identity, process_start


@dataclass(frozen=True)
class ProcessMark:
    """One process.

    Attributes:
        machine: the machine since it was booted, and the container in which process numbers count.
        pid: its number there.
        started: when it was started, in the units of the operating system.
    """

    machine: str
    pid: int
    started: int

    @classmethod
    def own(cls) -> ProcessMark:
        """The mark of this process."""
        return cls(machine_identity(), os.getpid(), process_start(os.getpid()) or 0)

    @classmethod
    def parse(cls, text: str) -> ProcessMark | None:
        """The inverse of `str`; None for any other text."""
        parts = text.split("-")
        if len(parts) != 3 or not all(part.isascii() and part.isalnum() for part in parts):
            return None
        machine, pid, started = parts
        if not (pid.isdecimal() and started.isdecimal() and len(pid) < 12 and len(started) < 24):
            return None
        return cls(machine, int(pid), int(started))

    def __str__(self) -> str:
        return f"{self.machine}-{self.pid}-{self.started}"

    @property
    def is_alive(self) -> bool | None:
        """Whether the process runs; None: it belongs to another machine or container and cannot be looked at."""
        if self.machine != machine_identity():
            return None
        return is_running(self.pid) and process_start(self.pid) == self.started
