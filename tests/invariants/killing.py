"""Runs that are killed at random moments until they are done: the layouts, the moments, and the count of what survived.

Every process that a kill must end has ended soon after it, nothing temporary stays, and the weights at the end have
the bits of a run that was never killed.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from onward.operating_system import is_running
from tests.invariants.elastic import checkpoints, make_workplace, weights_of
from tests.invariants.lives import KillInExport, Life, Who, start_server, wait_until

ORPHAN_SECONDS = 30.0
"""In which all processes that a kill must end have ended, also in start-up."""
LONGEST_SECONDS = 120.0
STEPS, PERIOD_UPDATES = 60, 3

Moment = Literal["start-up", "any", "save", "export"]
MOMENTS: tuple[Moment, ...] = ("start-up", "any", "save", "export")

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "one process": {"data_parallel_size": 1},
    "replicas": {"data_parallel_size": 2},
    "ZeRO 1": {"data_parallel_size": 2, "zero_stage": 1},
    "ZeRO 2": {"data_parallel_size": 2, "zero_stage": 2},
    "ZeRO 3": {"data_parallel_size": 2, "zero_stage": 3},
    "tensor parallel": {"horizontal_parallel_size": 2, "data_parallel_size": 1},
    "pipeline": {"pipeline_parallel_size": 2, "data_parallel_size": 1},
    "replicas of a pipeline": {"pipeline_parallel_size": 2, "data_parallel_size": 2},
    "adapters": {"data_parallel_size": 2, "zero_stage": 1},
}
SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "adapters": {
        "adapter": {"rank": 2, "dropout": 0.1, "targets": ["*"]},
        "averaging": {"kind": "ema", "decay": 0.9},
    },
}
"""Layout -> what else its run asks for."""


@dataclass
class Tally:
    """What happened to a layout.

    Attributes:
        kills: by who was killed and at which moment.
        runs: that reached their end through kills.
        differing: of these, those whose weights are not those of the run that was never killed.
        orphans: processes that were still there `ORPHAN_SECONDS` after a kill that must end them.
        leftovers: temporary files that were still there after the end of a run.
        slowest_seconds: the longest time between a kill and the end of all processes that it must end.
        seconds: all of that took.
    """

    kills: Counter[tuple[Who, Moment]] = field(default_factory=Counter)
    runs: int = 0
    differing: int = 0
    orphans: int = 0
    leftovers: int = 0
    slowest_seconds: float = 0.0
    seconds: float = 0.0

    def count(self, word: str | None = None) -> int:
        """Kills; of whom, or at which moment."""
        return sum(number for kind, number in self.kills.items() if word is None or word in kind)

    @property
    def is_held(self) -> bool:
        """Whether nothing was lost and nothing left behind."""
        return self.runs > 0 and not (self.differing or self.orphans or self.leftovers)


def ranks_of(layout: str) -> int:
    """How many processes compute in a layout."""
    ranks = 1
    for name, size in LAYOUTS[layout].items():
        ranks *= size if name.endswith("parallel_size") else 1
    return ranks


def make_run(folder: Path, layout: str, **distributed: Any) -> Path:
    """A folder with a model, data and a `run.yaml` of a layout: 30 updates, a checkpoint after every third."""
    folder.mkdir()
    make_workplace(folder, max(2, ranks_of(layout)), STEPS)
    file = folder / "run.yaml"
    sections = yaml.safe_load(file.read_text()) | SECTIONS.get(layout, {})
    # A rank that dies before it has reached the others is known to a launcher only; some lives have none.
    sections["distributed"] = {
        "timeout_seconds": 20.0, "start_timeout_seconds": 12.0, **LAYOUTS[layout], **distributed
    }  # fmt: skip
    sections["checkpoint"]["checkpoint_period"] = PERIOD_UPDATES
    sections["learning_rate"]["warmup_steps"] = STEPS // 6
    file.write_text(yaml.safe_dump(sections))
    return folder


class Arena:
    """A layout that is killed: its folder, its moments, and what happened so far.

    Args:
        folder: that is made for it.
        layout: a name of `LAYOUTS`.
        seed: of the moments.
        fault: called in every process that may be killed, with its rank.
    """

    def __init__(self, folder: Path, layout: str, seed: int, fault: Callable[[int], None] | None = None) -> None:
        self.layout, self.ranks, self.tally, self._fault = layout, ranks_of(layout), Tally(), fault
        self.folder = make_run(folder, layout)
        self._random = random.Random(f"{layout} {seed}")
        start_server()
        started = time.monotonic()
        life = Life(self.folder, "whole", self.ranks, is_launched=False)
        wait_until(lambda: None not in life.exit_codes(), LONGEST_SECONDS)
        assert life.exit_codes() == [0] * self.ranks, life.log()
        self._run_seconds = time.monotonic() - started
        self._export_seconds = float((folder / "whole.exported").read_text())
        self.expected = weights_of(folder / "whole")

    def kill(self, count: int) -> Tally:
        """Kills so often, lets the last run come to its end, and counts."""
        started, self._left = time.monotonic(), count
        while self._left:
            assert self.tally.runs <= 4 * count, f"{self.layout}: runs end before they are killed: {self.tally}"
            output = f"run{self.tally.runs}"
            is_launched = self.tally.runs % 2 == 0
            while not self._live(output, is_launched):
                pass
            self.tally.runs += 1
            self.tally.differing += weights_of(self.folder / output) != self.expected
            self.tally.leftovers += sum(1 for path in (self.folder / output).rglob(".*tmp-*"))
        self.tally.seconds += time.monotonic() - started
        return self.tally

    def _live(self, output: str, is_launched: bool) -> bool:
        """One life through one or more kills; whether the run is over."""
        options = ["--distributed.max_restarts=20"] if is_launched else []
        life = Life(self.folder, output, self.ranks, is_launched, options, self._fault)
        try:
            while self._left and self._kill_once(life):
                pass
            if not wait_until(lambda: None not in life.exit_codes(), LONGEST_SECONDS):
                raise AssertionError(f"{self.layout}: {output} did not end: {life.log()[-2000:]}")
            self._await_end(life.alive())
            return all(code == 0 for code in life.exit_codes())
        finally:
            life.end()

    def _kill_once(self, life: Life) -> bool:
        """Waits for the next moment, kills, and waits until everybody has ended who must; whether the life
        continues.
        """
        moment = MOMENTS[self.tally.count() % len(MOMENTS)]
        choices: list[Who] = ["launcher", "a rank", "all"] if life.is_launched else ["a rank", "all"]
        who, rank = self._random.choice(choices), self._random.randrange(self.ranks)
        before = life.alive()
        if moment == "export":
            mark = f"killed{self.tally.count()}"
            seconds = self._random.uniform(0, self._export_seconds)
            life.kill_in_export(KillInExport(who, rank, seconds, mark))
            wait_until(lambda: life.is_over or (self.folder / mark).exists(), LONGEST_SECONDS)
            was_killed, before = (self.folder / mark).exists(), before | life.alive()
        else:
            self._wait(moment, life)
            if who != "launcher":
                wait_until(lambda: life.is_over or rank in life.ranks(), LONGEST_SECONDS)
            before = life.alive()
            was_killed = not life.is_over and life.kill(who, rank)
        if was_killed:
            self._left -= 1
            self.tally.kills[who, moment] += 1
            goes_on = life.is_launched and who == "a rank"
            started = time.monotonic()
            self._await_end(before - ({life.launcher} if goes_on else set()))
            self.tally.slowest_seconds = max(self.tally.slowest_seconds, time.monotonic() - started)
            return goes_on
        if set(life.exit_codes()) - {0, None}:
            raise AssertionError(f"{self.layout}: exit codes {life.exit_codes()}, nobody was killed: {life.log()}")
        return False

    def _await_end(self, pids: set[int]) -> None:
        wait_until(lambda: not any(map(is_running, pids)), ORPHAN_SECONDS)
        self.tally.orphans += sum(map(is_running, pids))

    def _wait(self, moment: Moment, life: Life) -> None:
        """Until the moment has come, or the life is over."""
        folder = self.folder / life.output
        before = checkpoints(folder)
        draw = self._random.uniform
        if moment == "start-up":
            wait_until(lambda: life.is_over, draw(0.0, 0.7 * self._run_seconds))
            return
        wait_until(lambda: life.is_over or checkpoints(folder) != before, LONGEST_SECONDS)
        if moment == "save":
            temporary = folder / "checkpoints"
            wait_until(lambda: life.is_over or any(temporary.glob(".tmp-*")), LONGEST_SECONDS)
            wait_until(lambda: life.is_over, draw(0.0, 0.01))
        else:
            wait_until(lambda: life.is_over, draw(0.0, 0.3 * self._run_seconds))
