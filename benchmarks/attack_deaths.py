"""Attacks on a run at work: kills, stops, signals, hangs, a slow rank, memory that runs out; `tests.invariants.lives`.

Held is a disturbance after which the run ends by itself or resumes with the same command, with the bits of a run that
was never disturbed, and leaves no process behind. The launcher, its workers and the signals are real.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.invariants.elastic import checkpoints, weights_of
from tests.invariants.killing import MOMENTS, Arena, make_run
from tests.invariants.lives import Life, wait_until

from benchmarks.attack_row import Result, Row

RANKS, LONGEST_SECONDS = 2, 120.0
TIMEOUT_SECONDS = 4.0
"""Of collectives: so soon a hang is noticed."""


@dataclass(frozen=True)
class Disturbance:
    """What happens to a run of two replicas under onward's launcher, and how it must end.

    Attributes:
        name: for the table.
        act: does it, after the first checkpoint.
        fault: as `tests/invariants/faulty/sitecustomize.py` names it, instead.
        options: further arguments of `onward train`.
        exit_code: 3: the run has saved, and the same command is started again.
        words: what the run must print.
        is_exact: whether the weights are those of a run that was never disturbed.
        within_seconds: from the disturbance to the end.
    """

    name: str
    act: Callable[[Life, random.Random], None] | None = None
    fault: str = ""
    options: tuple[str, ...] = ()
    exit_code: int = 0
    words: tuple[str, ...] = ()
    is_exact: bool = True
    within_seconds: float = LONGEST_SECONDS


def send(number: signal.Signals, to_launcher: bool = False) -> Callable[[Life, random.Random], None]:
    """A signal to a rank at random, or to the launcher."""

    def act(life: Life, draw: random.Random) -> None:
        ranks = life.ranks()
        if ranks:
            os.kill(life.launcher or 0 if to_launcher else ranks[draw.choice(sorted(ranks))], number)

    return act


def stop_for_a_while(life: Life, draw: random.Random) -> None:
    """SIGSTOP to a rank, and SIGCONT before the timeout of collectives."""
    ranks = life.ranks()
    if ranks:
        pid = ranks[draw.choice(sorted(ranks))]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(draw.uniform(0.2, TIMEOUT_SECONDS / 2))
        os.kill(pid, signal.SIGCONT)


def inject(rank: int, fault: str) -> None:
    """Called in each process of a life: the fault comes in its loop over steps."""
    from tests.invariants.faulty import sitecustomize

    from onward.engine.building import rounds

    os.environ["FAULT"] = fault
    sitecustomize._make_faulty(rounds)


def _what_is_lost(folder: Path, output: str, one: Disturbance, expected: dict[str, bytes], seed: str) -> str:
    """What is wrong after a disturbance; nothing: ""."""
    draw = random.Random(seed)
    fault = one.fault.replace("ONCE", f"{output}.once")
    life = Life(folder, output, RANKS, True, one.options, inject if fault else None, (fault,) if fault else ())
    try:
        if one.act is not None:
            wait_until(lambda: life.is_over or bool(checkpoints(folder / output)), LONGEST_SECONDS)
            time.sleep(draw.uniform(0, 0.2))
            one.act(life, draw)
        if not wait_until(lambda: not life.alive(), one.within_seconds):
            return f"{len(life.alive())} processes are there after {one.within_seconds:g} s"
        codes, log = life.exit_codes(), life.log()
    finally:
        life.end()
    if codes not in ([one.exit_code], [0]):
        return f"exit code {codes}, expected {one.exit_code}: {log[-300:]}"
    missing = [words for words in one.words if words not in log]
    if missing:
        return f"it did not print {missing[0]!r}: {log[-300:]}"
    if codes != [0]:
        again = Life(folder, output, RANKS, True, one.options)
        wait_until(lambda: not again.alive(), LONGEST_SECONDS)
        again.end()
        if again.exit_codes() != [0]:
            return f"the same command did not resume: exit code {again.exit_codes()}: {again.log()[-300:]}"
    if one.is_exact and weights_of(folder / output) != expected:
        return "other weights than those of a run that was never disturbed"
    return ""


@functools.cache
def _undisturbed() -> tuple[Path, dict[str, bytes], tempfile.TemporaryDirectory[str]]:
    """A folder for runs, the weights of one that nothing happened to, and what keeps the folder until the end."""
    temporary = tempfile.TemporaryDirectory()
    folder = make_run(Path(temporary.name) / "run", "replicas", timeout_seconds=TIMEOUT_SECONDS)
    life = Life(folder, "entire", RANKS, True)
    wait_until(lambda: not life.alive(), LONGEST_SECONDS)
    life.end()
    return folder, weights_of(folder / "entire"), temporary


def row(name: str, disturbances: Sequence[Disturbance]) -> Row:
    """Tries each disturbance once, and at other moments until the time is over."""

    def run(seconds: float, seed: int) -> Result:
        began, tried, lost = time.monotonic(), 0, []
        folder, expected, _ = _undisturbed()
        while tried < len(disturbances) or time.monotonic() - began < seconds:
            one = disturbances[tried % len(disturbances)]
            wrong = _what_is_lost(folder, f"out-{uuid.uuid4().hex}", one, expected, f"{seed} {tried}")
            lost += [f"{one.name}: {wrong}"] if wrong else []
            tried += 1
        return Result(tried, tried - len(lost), tuple(lost))

    return Row("deaths", name, run)


def _kills(seconds: float, seed: int) -> Result:
    """One kill for each moment, again until the time is over."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        arena = Arena(Path(folder) / "arena", "replicas", seed)
        tally = arena.kill(len(MOMENTS))
        while time.monotonic() - began < seconds:
            tally = arena.kill(len(MOMENTS))
    lost = [f"{n} {what}" for what in ("differing", "orphans", "leftovers") if (n := getattr(tally, what))]
    return Result(tally.count(), tally.count() - (tally.differing + tally.orphans + tally.leftovers), tuple(lost))


GRACE = ("--checkpoint.grace_seconds=30",)
RESTARTED = ("restarting all ranks from ", "resumed from ")

ROWS = (
    Row("deaths", "SIGKILL to launcher, rank or all", _kills),
    row(
        "a rank crashes, hangs or is stopped for good",
        [
            Disturbance("SIGKILL", fault="kill,1,12,ONCE", words=RESTARTED),
            Disturbance("an exception", fault="bug,0,12,ONCE", words=(*RESTARTED, "a bug")),
            Disturbance("a hang in C code", fault="hang,1,12,ONCE", words=(*RESTARTED, "No heartbeat from rank 1")),
            Disturbance("SIGSTOP", fault="stop,1,12,ONCE", words=(*RESTARTED, "is stopped by a signal (SIGSTOP)")),
        ],
    ),
    row("SIGSTOP and SIGCONT to a rank", [Disturbance("SIGSTOP, SIGCONT", stop_for_a_while)]),
    row("SIGTERM to a rank", [Disturbance("SIGTERM", send(signal.SIGTERM), exit_code=3)]),
    row(
        "a slow rank",
        [
            Disturbance(
                "slow", fault="slow,1,1", options=("--distributed.slow_rank_period=3",), words=("is slow: its own",)
            )
        ],
    ),
    row(
        "memory runs out",
        [
            Disturbance(
                "out of memory",
                fault="memory2,1,12",
                options=("--training.halve_batch_on_out_of_memory=true",),
                words=("micro-batches of 2 samples instead of 4", "resumed from "),
                is_exact=False,  # halves of a batch are added up in another order
            )
        ],
    ),
    row(
        "preemption with a deadline",
        [
            Disturbance("SIGTERM", send(signal.SIGTERM, True), options=GRACE, exit_code=3, within_seconds=30),
            Disturbance(
                "SIGUSR1",
                send(signal.SIGUSR1, True),
                options=(*GRACE, "--checkpoint.on_sigusr1=stop"),
                exit_code=3,
                within_seconds=30,
            ),
        ],
    ),
)
