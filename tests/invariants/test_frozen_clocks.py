"""Runs of two ranks whose clocks stand still, in every process: they end as with clocks that go, faults included."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.invariants.killing import make_run
from tests.invariants.lives import Life, wait_until

LONGEST_SECONDS = 90.0


def freeze(rank: int, fault: str) -> None:
    """Called in every process of a life, before anything else."""
    for name in ("time", "monotonic", "perf_counter"):
        now = getattr(time, name)()
        setattr(time, name, lambda now=now: now)
        setattr(time, f"{name}_ns", lambda now=now: int(now * 1e9))
    if fault and rank >= 0:
        from onward.engine.building import rounds
        from tests.invariants.faulty import sitecustomize

        os.environ["FAULT"] = fault
        sitecustomize._make_faulty(rounds)


FAULTS = {
    "no fault": ("", "trained model"),
    "killed": ("kill,1,12", "rank 1"),
    "an exception": ("bug,0,12", "a bug"),
    "the user's mistake": ("mistake,1,12", "the shard lies."),
    "stopped": ("stop,1,12", "No heartbeat from rank 1"),
    "hangs": ("hang,0,12", "No heartbeat from rank 0"),
}
"""Name -> the fault as `tests/invariants/faulty/sitecustomize.py` names it, and what the run must print."""


@pytest.mark.parametrize(
    ("name", "is_launched"),
    [
        pytest.param(name, is_launched, marks=[] if in_short else pytest.mark.slow)
        for name in FAULTS
        for is_launched, in_short in ((True, name in ("no fault", "stopped")), (False, name == "hangs"))
    ],
)
def test_a_run_ends(tmp_path: Path, name: str, is_launched: bool) -> None:
    fault, words = FAULTS[name]
    folder = make_run(tmp_path / "run", "replicas", timeout_seconds=4.0, max_restarts=0)
    life = Life(folder, "out", 2, is_launched, (), freeze, (fault,))
    try:
        is_over = wait_until(lambda: not life.alive(), LONGEST_SECONDS)
        log = life.log()
        assert is_over, log[-3000:]
        expected = {0} if not fault else {2} if fault.startswith("mistake") else {1}
        codes = {code for code in life.exit_codes() if code is None or code >= 0}
        assert codes == expected, log[-3000:]
        assert words in log
        assert "division by zero" not in log
    finally:
        life.end()
