"""Nodes of an elastic run that are lost and come back: those left resume with the same samples in an update.

Every node is an agent of torchrun on this machine; the store of their rendezvous is on none of them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.invariants.elastic import TRAIN, checkpoints, into, make_workplace, weights_of, workers_of
from tests.parallel.starting import environment, free_port, run, torchrun

pytestmark = pytest.mark.slow
LONGEST_SECONDS = 180.0
STORE = (
    "import sys, time; from torch.distributed import TCPStore; "
    "store = TCPStore('localhost', int(sys.argv[1]), is_master=True, wait_for_workers=False); time.sleep(900)"
)
KEEP = "--checkpoint.max_num_checkpoints=1000"
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Nodes:
    """Agents of torchrun, and what all of them and their workers print."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.agents, self.log = folder, list[subprocess.Popen[str]](), folder / "log.txt"
        conf = "is_host=0,last_call_timeout=2,keep_alive_interval=1"
        self.command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2:3", "--nproc-per-node", "1", "--max-restarts",
            "5", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "lost",
            "--rdzv-conf", conf, "--local-addr", "localhost", *TRAIN, *into("nodes"), KEEP,
        ]  # fmt: skip

    def add(self) -> None:
        """Starts another node."""
        with self.log.open("a") as log:
            self.agents.append(
                subprocess.Popen(
                    self.command, cwd=self.folder, env=environment(**OWN_STORE), stdout=log, stderr=log, text=True
                )
            )

    def lose(self, agent: subprocess.Popen[str]) -> None:
        """Kills a node: the agent, and its workers with it."""
        for process in (agent.pid, *workers_of(agent)):
            os.kill(process, signal.SIGKILL)

    def of_rank(self, rank: int) -> subprocess.Popen[str]:
        """The agent whose worker is that rank."""
        wanted = f"RANK={rank}".encode()
        return next(
            agent
            for agent in self.agents
            for worker in workers_of(agent)
            if wanted in Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
        )

    @property
    def said(self) -> str:
        return self.log.read_text()

    def wait_for(self, condition: Callable[[], bool]) -> float:
        """Waits until something is so; seconds that it took."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < LONGEST_SECONDS, self.said[-4000:]
            time.sleep(0.05)
        return time.monotonic() - began

    def wait_for_resume(self, times: int) -> float:
        return self.wait_for(lambda: self.said.count("resumed from") == times)

    def wait_for_new_checkpoints(self) -> None:
        before = checkpoints(self.folder / "nodes")
        self.wait_for(lambda: len(checkpoints(self.folder / "nodes") - before) >= 2)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Of a run whose updates have 24 samples."""
    make_workplace(tmp_path, 3, steps=1200, zero_stage=2, elastic=True)
    port = free_port()
    with subprocess.Popen([sys.executable, "-c", STORE, str(port)]) as store:
        started = Nodes(tmp_path, port)
        try:
            yield started
        finally:
            for agent in started.agents:
                with contextlib.suppress(OSError):
                    started.lose(agent)
            store.kill()


def test_nodes_are_lost_and_come_back(nodes: Nodes) -> None:
    """The node of rank 0 is lost, and one comes back: each part ends in the bits of a run resumed in its layout."""
    for _ in range(3):
        nodes.add()
    nodes.wait_for_new_checkpoints()
    nodes.lose(nodes.of_rank(0))
    lost = nodes.wait_for_resume(1)
    assert lost < 60, "seconds until those left have resumed"
    nodes.wait_for_new_checkpoints()
    nodes.add()
    nodes.wait_for_resume(2)
    nodes.wait_for(lambda: all(agent.poll() is not None for agent in nodes.agents))
    assert sorted(agent.returncode for agent in nodes.agents) == [-signal.SIGKILL, 0, 0, 0], nodes.said[-4000:]

    first, second = _resumed(nodes.said)
    assert re.search(rf"stopped by .* after step \d+; saved as \S+/{second}\.", nodes.said), "the run saves first"
    for words in (
        "3 replicas with micro-batches of 4 samples, 2",
        "2 replicas with micro-batches of 4 samples, 3",
    ):
        assert f"distributed.elastic: {words} an update, which has 24 samples" in nodes.said
    assert "trained with other fields" not in nodes.said
    assert re.search(r"samples +[\d,]+ since step \d+, 14,400 in total", nodes.said), "600 updates of 24"
    _resume_in_layout(nodes.folder, first, "two", 2, f"--checkpoint.checkpoint_period={int(second[-8:])}")
    _resume_in_layout(nodes.folder, second, "three", 3)
    assert first != second
    saved = [nodes.folder / output / "checkpoints" / second for output in ("nodes", "two")]
    assert _tensors(saved[0]) == _tensors(saved[1])
    assert weights_of(nodes.folder / "three") == weights_of(nodes.folder / "nodes")


def _resumed(said: str) -> list[str]:
    """Names of the checkpoints that were resumed from, in order."""
    return re.findall(r"resumed from \S*/(checkpoint-\d+):", said)


def _resume_in_layout(folder: Path, checkpoint: str, output: str, ranks: int, *options: str) -> None:
    """Trains from a checkpoint of the nodes to the end, undisturbed, in another folder."""
    shutil.copytree(folder / "nodes" / "checkpoints" / checkpoint, folder / output / "checkpoints" / checkpoint)
    variables = [f"{name}={value}" for name, value in OWN_STORE.items()]
    done = run(["env", *variables, *torchrun(ranks), *TRAIN, *into(output), KEEP, *options], folder)
    assert done.returncode == 0, done.stderr


def _tensors(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")}
