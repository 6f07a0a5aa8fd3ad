"""How tests start processes: each launcher's command line, and an environment without traces of another."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

WORKER = str(Path(__file__).with_name("worker.py"))
ROOT = Path(__file__).resolve().parents[2]
LONGEST_SECONDS = 120.0

needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here; install openmpi-bin")

needs_mpich = pytest.mark.skipif(shutil.which("mpirun.mpich") is None, reason="no mpirun.mpich here; install mpich")


def environment(**more: str) -> dict[str, str]:
    """Of the test, without what a launcher may have set, and with our modules in the path."""
    prefixes = ("OMPI_", "PMI", "SLURM_", "TORCHELASTIC_", "MASTER_", "GLOO_", "ONWARD_")
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes) and name not in names}
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **more,
    }


def torchrun(count: int, *options: str) -> list[str]:
    """`torchrun` on one machine, for a script or `-m module` that follows."""
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), *options]


def mpirun(count: int) -> list[str]:
    """`mpirun` of Open MPI, for a program that follows; as root, and whatever the number of cores."""
    return ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(count), sys.executable]


def mpich(count: int) -> list[str]:
    """`mpirun` of MPICH, for a program that follows."""
    return ["mpirun.mpich", "-n", str(count), sys.executable]


def own_launcher(count: int) -> list[str]:
    """The launcher of `onward train`, for arguments of Python that follow."""
    imports = "import sys; from onward.parallel.launch.launching import launch_workers"
    program = imports + "; sys.exit(launch_workers({}, sys.argv[1:]))"
    return [sys.executable, "-c", program.format(count)]


def wait_for(*files: Path) -> None:
    """Until all of them have been written."""
    deadline = time.monotonic() + LONGEST_SECONDS
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline, f"no {files}"
        time.sleep(0.05)


def run(command: Sequence[str], folder: Path, seconds: float = LONGEST_SECONDS) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; fails after `seconds`."""
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=seconds, check=False
    )


def free_port() -> int:
    """A port that nobody listens at right now, out of those that the kernel gives nobody by itself (32768 and up)."""
    while True:
        port = random.SystemRandom().randrange(10_000, 20_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


@dataclass(frozen=True)
class Nodes:
    """Two network namespaces with a cable between them, each a machine as far as the network goes.

    Attributes:
        names: of the namespaces.
        addresses: of each, as the other one sees it.
    """

    names: tuple[str, str]
    addresses: tuple[str, str] = ("10.77.0.1", "10.77.0.2")

    def start(
        self, node: int, command: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Starts a command on a node, which has its own host name."""
        inside = ["unshare", "--uts", "sh", "-c", f'hostname node{node}; exec "$@"', "sh", *command]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[node], *inside],
            cwd=folder,
            env=environment(**(variables or {})),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def cut_cable(self) -> None:
        """From now on nothing passes between the nodes."""
        self._set_cable("down")

    def mend_cable(self) -> None:
        """Everything passes again."""
        self._set_cable("up")

    def _set_cable(self, state: str) -> None:
        subprocess.run(["ip", "-n", self.names[1], "link", "set", "eth", state], check=True)


@contextlib.contextmanager
def two_nodes() -> Iterator[Nodes]:
    """Two nodes; skips the test where this process may not make them."""
    mark = uuid.uuid4().hex[:8]
    nodes = Nodes((f"onward-{mark}-0", f"onward-{mark}-1"))
    setup = [["ip", "netns", "add", name] for name in nodes.names]
    setup.append(
        ["ip", "link", "add", "eth", "netns", nodes.names[0], "type", "veth", "peer", "eth", "netns", nodes.names[1]]
    )
    for name, address in zip(nodes.names, nodes.addresses, strict=True):
        setup.append(["ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth"])
        setup.extend(["ip", "-n", name, "link", "set", device, "up"] for device in ("lo", "eth"))
    try:
        for command in setup:
            done = subprocess.run(command, capture_output=True, text=True, check=False) if shutil.which("ip") else None
            if done is None or done.returncode:
                pytest.skip(f"cannot make network namespaces: {done.stderr.strip() if done else 'no `ip` here'}")
        yield nodes
    finally:
        if shutil.which("ip"):
            for name in nodes.names:
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
