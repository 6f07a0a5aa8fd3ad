"""Phases that take long are announced while they last, those that do not are not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from onward.commands.training import TrainOptions, train
from onward.report.phases import Phases
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
    phases.end()
    count = len(said)
    assert said[0] == "reading the model ..."
    assert said[1].startswith("still reading the model (0.04 s so far) ...")
    time.sleep(0.1)
    assert len(said) <= count + 1  # one may have been on its way


def test_a_quick_phase_is_not_announced() -> None:
    said: list[str] = []
    phases = Phases(said.append, 5.0)
    for name in ("reading", "building", "loading"):
        phases.begin(name)
    phases.end()
    time.sleep(0.05)
    assert said == []


SLOW = {
    "reading the model": "onward.runner.read_training_graph",
    "building the network": "onward.runner.assemble",
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
    import importlib

    module, _, name = SLOW[phase].rpartition(".")
    owner = importlib.import_module(module)
    real = getattr(owner, name)

    def slow(*arguments: object, **options: object) -> object:
        time.sleep(0.25)
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, slow)
    train(workplace / "run.yaml", {}, TrainOptions(), Phases(lambda text: None, 0.15))
    assert f"note   {phase} ..." in capsys.readouterr().out
