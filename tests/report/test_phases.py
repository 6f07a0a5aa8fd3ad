"""Phases that take long are announced while they last, those that do not are not."""

from __future__ import annotations

import importlib
import re
import threading
import time
from pathlib import Path

import pytest

from onward.commands.training import TrainOptions, train
from onward.data.in_memory import InMemoryDataLoader
from onward.data.loader import DataLoader
from onward.report.phases import Phases
from onward.runner import TrainingRunner
from tests.mlp import ON_ONE_THREAD, data, parameters, save_mlp, write_shards
from tests.test_cli import workplace  # noqa: F401


def wait_for(said: list[str], count: int) -> None:
    ends = time.monotonic() + 20
    while len(said) < count and time.monotonic() < ends:
        time.sleep(0.005)


def test_a_slow_phase_is_announced_while_it_lasts_and_again() -> None:
    said: list[str] = []
    phases = Phases(said.append, 0.02, 0.02)
    phases.begin("reading the model")
    wait_for(said, 3)
    phases.end()  # waits for one that is on its way
    count = len(said)
    assert said[0] == "reading the model ..."
    assert re.fullmatch(r"still reading the model \(0\.\d\d s so far\) \.\.\.", said[1])
    time.sleep(0.1)
    assert len(said) == count


def test_a_quick_phase_is_not_announced() -> None:
    said: list[str] = []
    phases = Phases(said.append, 5.0)
    for name in ("reading", "building", "loading"):
        phases.begin(name)
    phases.end()
    time.sleep(0.05)
    assert said == []


SLOW = {
    "reading the model": "onward.run.read_training_graph",
    "building the network": "onward.run.assemble",
    "reading the first batch": "onward.data.loader.load_shard",
    "evaluating": "onward.engine.evaluating.evaluation._evaluate",
}


@pytest.mark.parametrize("phase", SLOW)
def test_every_phase_of_a_run_says_what_it_does(
    workplace: Path,  # noqa: F811
    phase: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module, _, name = SLOW[phase].rpartition(".")
    owner = importlib.import_module(module)
    real = getattr(owner, name)

    def slow(*arguments: object, **options: object) -> object:
        time.sleep(0.25)
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, slow)
    train(workplace / "run.yaml", {}, TrainOptions(), Phases(lambda text: None, 0.15))
    assert f"note   {phase} ..." in capsys.readouterr().out


FAILING = {**SLOW, "the first step": "onward.training_round.round_steps"}


def names_of_new_threads(before: set[threading.Thread]) -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "phase" and one not in before]


def train_here(runner: TrainingRunner, folder: Path) -> None:
    runner.initialize()
    with DataLoader({}, folder) as source:
        runner.run(source, InMemoryDataLoader(data(8)))


@pytest.mark.parametrize("phase", FAILING)
def test_a_phase_that_fails_is_over(tmp_path: Path, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a notebook would go on to read "still reading the model" for as long as it is open."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no more")

    save_mlp(tmp_path)
    folder = write_shards(tmp_path / "train", data(32))
    module, _, name = FAILING[phase].rpartition(".")
    monkeypatch.setattr(importlib.import_module(module), name, fail)
    before = set(threading.enumerate())
    runner = TrainingRunner(parameters(tmp_path, training={"evaluation_period": 1}), ON_ONE_THREAD)
    with pytest.raises(Exception, match="no more"):
        train_here(runner, folder)
    deadline = time.monotonic() + 20.0
    while names_of_new_threads(before) and time.monotonic() < deadline:
        time.sleep(0.005)  # it ends by itself, a moment later
    assert names_of_new_threads(before) == []
