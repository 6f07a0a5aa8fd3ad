"""A process that saves is killed, at random moments and at every single one before and after a change of the disk; each
time the latest checkpoint is complete, consistent, and at least as new as the last one known to be complete."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.checkpoint.reading import find_latest, list_checkpoints
from onward.checkpoint.writing import CheckpointWriter
from tests.checkpoint.saving_server import KEPT, check, content

ROOT = Path(__file__).resolve().parents[2]
SHORTEST_LIFE_SECONDS = 0.005
LONGEST_LIFE_SECONDS = 0.45

Server = subprocess.Popen[str]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A process that forks the processes to be killed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.checkpoint.saving_server"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def start(server: Server, command: str) -> int:
    """Has a process forked; returns its id."""
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(command + "\n")
    server.stdin.flush()
    return int(server.stdout.readline())


def end(server: Server) -> tuple[int, list[tuple[int, int]]]:
    """Exit code of the process, and the (number, save) it had told to be complete."""
    assert server.stdout is not None
    exit_code, *told = server.stdout.readline().split()
    pairs = [pair.split(":") for pair in told]
    return int(exit_code), [(int(number), int(save)) for number, save in pairs]


def moments(directory: Path) -> set[str]:
    """When a kill fell, as far as its leftovers tell."""
    names = [path.name for path in directory.iterdir()] if directory.exists() else []
    found = {
        "writing": any(name.startswith(".tmp-onward-checkpoint-") for name in names),
        "removing": any(name.startswith(".tmp-onward-removed-") for name in names),
        "replacing": any(name.startswith(".replaced-") for name in names),
    }
    return {moment for moment, hit in found.items() if hit}


@pytest.mark.parametrize(("seed", "kills"), [(1, 36), pytest.param(2, 150, marks=pytest.mark.slow)])
def test_killed_at_random_moments_the_latest_checkpoint_is_whole(
    tmp_path: Path, server: Server, seed: int, kills: int
) -> None:
    """One directory through many lives, asynchronous saves and blocking ones, each life continuing from the last.

    On a slow disk a life saves less; then there are more of them, until kills fell where they matter.
    """
    directory = tmp_path / "checkpoints"
    lengths = random.Random(seed)
    latest = (0, 0)
    seen: Counter[str] = Counter()
    life = 0
    while life < kills or latest <= (5, 0) or seen["writing"] < 5:
        assert life < 20 * kills, f"in {life} lives only {latest} was saved, and kills fell at {seen}"
        life += 1
        child = start(server, f"random {seed * 1000 + life} {directory}")
        time.sleep(lengths.uniform(SHORTEST_LIFE_SECONDS, LONGEST_LIFE_SECONDS))
        os.kill(child, signal.SIGKILL)
        exit_code, told = end(server)
        assert exit_code == -signal.SIGKILL, "the saving process failed by itself"
        found = check(directory, told)
        assert found >= latest
        latest = found
        # One more than kept between the arrival of a new one and the removal of the oldest.
        assert len(list_checkpoints(directory)) <= KEPT + 1
        seen.update(moments(directory))
    before = find_latest(directory)
    CheckpointWriter(directory, KEPT).close()
    assert find_latest(directory) == before
    assert not moments(directory)


def test_killed_at_every_moment_the_latest_checkpoint_is_whole(tmp_path: Path, server: Server) -> None:
    """From a directory with checkpoints 1 and 2: 2 is saved anew, then 3, and so 1 goes. Killed before and after every
    change of the disk, the latest is the old 2, the new 2 or 3; a next life clears the leftovers and saves on."""
    template = tmp_path / "template"
    with CheckpointWriter(template, KEPT) as writer:
        for number in (1, 2):
            writer.save(number, content(number, 0), {"number": number, "save": 0})
    latest = (2, 0)
    seen: Counter[str] = Counter()
    for moment in range(1, 1000):
        directory = tmp_path / f"killed at {moment}"
        shutil.copytree(template, directory)
        start(server, f"point {moment} {directory}")
        exit_code, told = end(server)
        found = check(directory, told)
        assert found >= latest
        latest = found
        if exit_code == 0:
            break
        assert exit_code == -signal.SIGKILL, "the saving process failed by itself"
        seen.update(moments(directory))
        with CheckpointWriter(directory, KEPT) as writer:
            assert check(directory, told) == found
            assert not moments(directory)
            writer.save(9, content(9, 0), {"number": 9, "save": 0})
        assert check(directory, [(9, 0)]) == (9, 0)
        assert len(list_checkpoints(directory)) == KEPT
        shutil.rmtree(directory)
    assert latest == (3, 0)
    assert moment > 60
    assert min(seen[name] for name in ("writing", "removing", "replacing")) >= 3
