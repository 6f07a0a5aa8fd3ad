"""A network that is lost between two nodes: both ends say so, naming the other, and the run resumes bit-equal."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.invariants.elastic import TRAIN, checkpoints, into, make_workplace, weights_of
from tests.parallel.starting import Nodes, free_port, two_nodes

RANKS, STEPS = 2, 3000
LONGEST_SECONDS = 100.0
"""From the cut to the end of both: a store that does not answer is given 20 s, a silent neighbor 60 s."""


def slurm(nodes: Nodes, rank: int, port: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(port), "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "0", "SLURM_NODEID": str(rank), "SLURM_STEP_NODELIST": ",".join(nodes.addresses),
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "MASTER_PORT": str(port),
    }  # fmt: skip


def train(nodes: Nodes, folder: Path, output: str) -> list[subprocess.Popen[str]]:
    """`onward train` on both nodes, each of which sees the same disk."""
    port = free_port()
    command = [sys.executable, *TRAIN, *into(output)]
    return [nodes.start(node, command, folder, slurm(nodes, node, port)) for node in range(RANKS)]


def outputs(processes: list[subprocess.Popen[str]], seconds: float) -> list[str]:
    try:
        return [process.communicate(timeout=seconds)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
def test_a_lost_network_ends_both_nodes_and_the_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    make_workplace(tmp_path, RANKS, STEPS)
    with two_nodes() as nodes:
        entire = train(nodes, tmp_path, "entire")
        said = outputs(entire, 300)
        assert [process.returncode for process in entire] == [0, 0], said
        cut = train(nodes, tmp_path, "cut")
        began = time.monotonic()
        while not checkpoints(tmp_path / "cut"):
            assert time.monotonic() - began < 200
            time.sleep(0.05)
        nodes.cut_cable()
        lost = time.monotonic()
        said = outputs(cut, LONGEST_SECONDS)
        assert time.monotonic() - lost < LONGEST_SECONDS
        assert [process.returncode for process in cut] == [1, 1], said
        assert re.search(r"rank 1 (on|\()\s?node1, process \d+", said[0]), said[0]
        assert re.search(r"rank 0 is gone \(10\.77\.0\.1:\d+ does not answer|rank 0 (on|\()\s?node0", said[1]), said[1]
        assert not (tmp_path / "cut" / "mlp_trained.onnx").exists()
        nodes.mend_cable()
        again = train(nodes, tmp_path, "cut")
        said = outputs(again, 300)
        assert [process.returncode for process in again] == [0, 0], said
    assert "resumed from " in said[0]
    assert weights_of(tmp_path / "cut") == weights_of(tmp_path / "entire")
