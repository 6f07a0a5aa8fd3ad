"""A rank that dies anywhere in its start-up: the others end in under half a minute, whoever started them.

Under onward's launcher they are restarted at once; on their own they have nobody but each other.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.invariants.killing import ORPHAN_SECONDS, make_run
from tests.invariants.lives import Life, start_server, wait_until

RANKS, START_SECONDS, LONGEST_SECONDS = 2, 5.0, 90.0
PLACES = (
    "onward.parallel.rendezvous.rendezvous:open_store",
    "onward.parallel.rendezvous.rendezvous:_sign_in",
    "onward.parallel.watch.failure:HeartbeatMonitor",
    "onward.parallel.launch.process:wait_for_all",
    "torch.distributed:init_process_group",
    "onward.parallel.launch.process:_make_mesh",
    "onward.commands.training:TrainingRunner",
    "onward.commands.training:_run_round",
)
"""Functions, in the order of their calls; a rank dies before it calls one of them."""


def die(rank: int, place: str, dead: int, mark: str) -> None:
    """Has a rank die before it calls a function."""
    if rank == dead:
        name, _, function = place.partition(":")

        def deadly(*arguments: object, **options: object) -> None:
            Path(mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(importlib.import_module(name), function, deadly)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    start_server()
    folder = tmp_path_factory.mktemp("start_up") / "run"
    return make_run(folder, "replicas", start_timeout_seconds=START_SECONDS)


def end_of(folder: Path, place: str, dead: int, is_launched: bool) -> str:
    """What is wrong with the end of a life in which a rank dies; nothing: ""."""
    output = f"{place.partition(':')[2]}{dead}{is_launched}"
    options = ["--distributed.max_restarts=0"] if is_launched else []
    life = Life(folder, output, RANKS, is_launched, options, die, (place, dead, f"{output}.dead"))
    try:
        if not wait_until((folder / f"{output}.dead").exists, LONGEST_SECONDS):
            return f"{output}: nobody died: {life.log()}"
        died = time.monotonic()
        if not wait_until(lambda: not life.alive(), ORPHAN_SECONDS):
            return f"{output}: {life.alive()} are still there after {ORPHAN_SECONDS} s: {life.log()}"
        codes = life.exit_codes()
        expected = [1] if is_launched else [-signal.SIGKILL if rank == dead else codes[rank] for rank in range(RANKS)]
        if codes != expected or 0 in codes or not life.log():
            return f"{output}: exit codes {codes} after {time.monotonic() - died:.1f} s: {life.log()}"
        return ""
    finally:
        life.end()


@pytest.mark.parametrize("is_launched", [True, False], ids=["launched", "on their own"])
def test_a_rank_that_dies_in_start_up_ends_the_others_in_half_a_minute(is_launched: bool, workplace: Path) -> None:
    cases = [(place, dead) for place in PLACES for dead in range(RANKS)]
    with ThreadPoolExecutor(4) as pool:
        wrong = [said for said in pool.map(lambda case: end_of(workplace, *case, is_launched), cases) if said]
    assert not wrong, "\n".join(wrong)
