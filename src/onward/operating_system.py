"""What each operating system tells in its own way: cores, memory, processes, network interfaces.

Linux is read directly (/proc, control groups); elsewhere psutil answers, which is installed there and not needed here.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import struct
import sys
import uuid
from pathlib import Path

_SIOCGIFADDR = 0x8915
"""Linux's ioctl for the IPv4 address of a network interface."""


def is_linux() -> bool:
    """Whether this is Linux, the system onward is tested on and the only one where it starts several processes."""
    return sys.platform.startswith("linux")


def usable_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_name(root: Path = Path("/")) -> str:
    """The name of this machine's processor, as its maker writes it; "" where the system does not tell."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        import platform

        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def is_amd(root: Path = Path("/")) -> bool:
    """Whether the processor is one of AMD's."""
    try:
        return "AuthenticAMD" in (root / "proc/cpuinfo").read_text()
    except OSError:
        return "AuthenticAMD" in processor_name(root)


def free_memory_bytes(root: Path = Path("/")) -> float:
    """Bytes that this machine could still give out, or the container that this process is in."""
    if not (root / "proc/meminfo").is_file():
        import psutil

        return float(psutil.virtual_memory().available)
    found = []
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    group = root / "sys/fs/cgroup"
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        if (group / limit).is_file() and (group / used).is_file():
            text = (group / limit).read_text().strip()
            if text != "max":
                found.append(max(0, int(text) - int((group / used).read_text())))
    return float(min(found))


def loaded_allocator(root: Path = Path("/")) -> str | None:
    """What gives this process memory instead of the C library: tcmalloc, jemalloc or mimalloc; None: nothing known."""
    try:
        loaded = (root / "proc/self/maps").read_text()
    except OSError:
        return None
    return next((name for name in ("tcmalloc", "jemalloc", "mimalloc") if f"/lib{name}" in loaded), None)


def peak_memory_bytes() -> int:
    """The most memory that this process has held so far."""
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    unit_bytes = 1024 if is_linux() else 1  # macOS counts bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def is_running(pid: int) -> bool:
    """Whether a process of this machine is alive; a zombie process is not."""
    if not is_linux():
        import psutil

        return bool(psutil.pid_exists(pid)) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


_STATES = {
    "T": "is stopped by a signal (SIGSTOP); SIGCONT lets it continue",
    "t": "is stopped by a debugger",
    "D": "waits for a disk, a network file system or a device that does not answer",
    "Z": "is gone",
    "X": "is gone",
    "R": "is running",
    "S": "is asleep",
}
"""Of Linux' letter for the state of a process, what it means for somebody who waits for that process."""


def process_state(pid: int) -> str | None:
    """What a process of this machine is doing, as a verb phrase; None where the system does not tell."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "is gone" if is_linux() else None
    return _STATES.get(letter, f"is in state {letter}")


def out_of_memory_kills(root: Path = Path("/")) -> int:
    """How many processes the kernel has killed for lack of memory so far, in this container or on this machine."""
    for name in ("sys/fs/cgroup/memory.events", "proc/vmstat"):
        with contextlib.suppress(OSError):
            for line in (root / name).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def open_file_of(pid: int, descriptor: int) -> Path:
    """A file that another process of this machine has open, as a path that opens it, too."""
    return Path(f"/proc/{pid}/fd/{descriptor}")


def stack_signal() -> int | None:
    """The signal that asks a rank for its stacks: one that nothing else uses; None where there is none."""
    return signal.SIGRTMIN + 7 if is_linux() else None


def starter_of_session() -> int:
    """The process that started this session: the same for all ranks of a machine under MPICH; 0 where it is unknown."""
    try:
        stat = Path(f"/proc/{os.getsid(0)}/stat").read_text()
    except (OSError, AttributeError):
        return 0
    return int(stat.rpartition(")")[2].split()[1])


def process_namespace() -> int:
    """The namespace (container) in which process numbers of this process count; 0 where there are none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def process_start(pid: int) -> int | None:
    """When a process was started, in units that only serve to tell two processes of one number apart; None: no such."""
    if not is_linux():
        import psutil

        try:
            return int(psutil.Process(pid).create_time() * 1000)
        except psutil.Error:
            return None
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None


def machine_identity() -> str:
    """This machine since it was booted, and the container in which process numbers count; 16 hexadecimal digits.

    Two machines with one host name differ, and so does a machine before and after it was restarted.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        import psutil

        boot = f"{socket.gethostname()} {uuid.getnode()} {int(psutil.boot_time()) // 60}"
    return hashlib.sha256(f"{boot} {process_namespace()}".encode()).hexdigest()[:16]


def interface_with_address(address: str) -> str | None:
    """The network interface that has an IPv4 address; None where there is none or the system is not asked."""
    if not is_linux():
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable, where the system can. OSError goes through."""
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows opens no directories, and writes names with the files
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
