"""Runs that are killed at random moments and started again: the layouts, the moments, and the count of what survived.

A life is `onward train` in forked processes that have torch imported already, started as by a launcher that does not
look after them. Every process of a life must have ended soon after the kill, and the weights at the end have the bits
of a run that was never killed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import yaml

from onward import runner
from onward.cli import main
from tests.invariants.elastic import checkpoints, make_workplace, weights_of
from tests.parallel.starting import free_port
from tests.ranks import _CONTEXT

ORPHAN_SECONDS = 30.0
"""In which all processes of a life must have ended after one was killed, also in start-up."""
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
}


@dataclass
class Tally:
    """What happened to a layout.

    Attributes:
        kills: by "who at which moment".
        runs: that reached their end through kills.
        differing: of these, those whose weights are not those of the run that was never killed.
        orphans: processes that were still there `ORPHAN_SECONDS` after a kill.
        slowest_seconds: the longest time between a kill and the end of all processes of that life.
    """

    kills: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    differing: int = 0
    orphans: int = 0
    slowest_seconds: float = 0.0

    @property
    def is_held(self) -> bool:
        """Whether nothing was lost and nothing left behind."""
        return self.runs > 0 and not (self.differing or self.orphans)


class Arena:
    """A layout that is killed: its folder, its moments, and what happened so far."""

    def __init__(self, folder: Path, layout: str, seed: int) -> None:
        self.layout, self.tally = layout, Tally()
        self.ranks = _ranks(layout)
        folder.mkdir()
        self.folder = make_workplace(folder, max(2, self.ranks), STEPS)
        self._random = random.Random(f"{layout} {seed}")
        file = folder / "run.yaml"
        sections = yaml.safe_load(file.read_text())
        # A rank that dies before it has reached the others is known to a launcher only; here there is none.
        sections["distributed"] = {"timeout_seconds": 20.0, "start_timeout_seconds": 12.0, **LAYOUTS[layout]}
        sections["checkpoint"]["checkpoint_period"] = PERIOD_UPDATES
        sections["learning_rate"]["warmup_steps"] = STEPS // 6
        file.write_text(yaml.safe_dump(sections))
        started = time.monotonic()
        life = self._begin("whole")
        _join(life, LONGEST_SECONDS)
        assert [process.exitcode for process in life] == [0] * self.ranks, (folder / "whole.log").read_text()
        self._run_seconds = time.monotonic() - started
        self._export_seconds = min(float(path.read_text()) for path in folder.glob("whole.exported*"))
        self.expected = weights_of(folder / "whole")

    def kill(self, count: int) -> Tally:
        """Kills so many lives, lets the last run come to its end, and counts."""
        left, number = count, 0
        while left:
            number += 1
            output = f"run{number}"
            done = False
            while not done:
                moment = MOMENTS[left % len(MOMENTS)] if left else None
                left, done = self._live(output, moment, left)
            self.tally.runs += 1
            self.tally.differing += weights_of(self.folder / output) != self.expected
        return self.tally

    def _live(self, output: str, moment: Moment | None, left: int) -> tuple[int, bool]:
        """One life; how many kills are left, and whether the run is over."""
        is_group = self.ranks == 1 or self._random.random() < 0.5
        chosen = range(self.ranks) if is_group else [self._random.randrange(self.ranks)]
        in_export = self._random.uniform(0, self._export_seconds) if moment == "export" else None
        life = self._begin(output, dict.fromkeys(chosen, in_export))
        if moment is not None:
            self._wait(moment, output, life)
        was_over = moment is None or any(process.exitcode == 0 for process in life)
        if was_over:
            _join(life, LONGEST_SECONDS)
        else:
            for rank in chosen:
                _kill(life[rank])
        killed = time.monotonic()
        _join(life, ORPHAN_SECONDS)
        codes = [process.exitcode for process in life]
        if -signal.SIGKILL in codes:
            self.tally.kills[f"{'all' if is_group else 'a rank'}, {moment}"] += 1
            self.tally.slowest_seconds = max(self.tally.slowest_seconds, time.monotonic() - killed)
            left -= 1
        elif codes != [0] * self.ranks:
            said = (self.folder / f"{output}.log").read_text()[-2000:]
            raise AssertionError(f"{self.layout}: exit codes {codes}, and nobody was killed: {said}")
        for process in life:
            if process.exitcode is None:
                self.tally.orphans += 1
                _kill(process)
        return left, all(code == 0 for code in codes)

    def _wait(self, moment: Moment, output: str, life: list[BaseProcess]) -> None:
        """Until the moment has come, or the run is over; in the export a rank ends by itself."""
        folder = self.folder / output
        before = checkpoints(folder)
        draw = self._random.uniform
        if moment == "start-up":
            _until(lambda: False, life, draw(0.0, 0.7 * self._run_seconds))
        elif moment == "export":
            _until(lambda: False, life)
        elif moment == "save":
            _until(lambda: checkpoints(folder) != before, life)
            _until(lambda: any((folder / "checkpoints").glob(".tmp-*")), life)
            _until(lambda: False, life, draw(0.0, 0.01))
        else:
            _until(lambda: checkpoints(folder) != before, life)
            _until(lambda: False, life, draw(0.0, 0.3 * self._run_seconds))

    def _begin(self, output: str, ends_in_export: Mapping[int, float | None] | None = None) -> list[BaseProcess]:
        """Forks the ranks of a life; some may end so many seconds after they have begun to export."""
        port = free_port()
        life = []
        for rank in range(self.ranks):
            seconds = (ends_in_export or {}).get(rank)
            process = _CONTEXT.Process(
                target=_train, args=(str(self.folder), output, rank, self.ranks, port, seconds), daemon=True
            )
            process.start()
            life.append(process)
        return life


def _ranks(layout: str) -> int:
    ranks = 1
    for name, size in LAYOUTS[layout].items():
        ranks *= size if name.endswith("parallel_size") else 1
    return ranks


def _train(folder: str, output: str, rank: int, ranks: int, port: int, ends_in_export: float | None) -> None:
    """A rank as srun would start it: nobody looks after it but the other ranks."""
    os.setsid()
    os.chdir(folder)
    log = os.open(f"{output}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    if ranks > 1:
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
    options = [f"--paths.output_dir={output}", f"--checkpoint.checkpoints_dir={output}/checkpoints"]
    _watch_export(Path(f"{output}.exported{rank}"), ends_in_export)
    os._exit(main(["train", "run.yaml", *options]))


def _watch_export(file: Path, ends_after_seconds: float | None) -> None:
    """Writes down how long the trained model took to write, or has this process killed with SIGKILL on the way."""
    export = runner.export_run

    def watched_export(*arguments: Any) -> Any:
        started = time.perf_counter()
        if ends_after_seconds is not None:
            timer = threading.Timer(ends_after_seconds, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
        written = export(*arguments)
        file.write_text(str(time.perf_counter() - started))
        return written

    runner.export_run = watched_export  # type: ignore[assignment]


def _kill(process: BaseProcess) -> None:
    with contextlib.suppress(OSError):
        os.kill(process.pid or 0, signal.SIGKILL)


def _join(life: list[BaseProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in life:
        process.join(max(0.0, deadline - time.monotonic()))


def _until(condition: Callable[[], bool], life: list[BaseProcess], seconds: float = LONGEST_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not condition() and all(process.exitcode is None for process in life):
        time.sleep(0.002)
