"""Every command says what it is doing while that takes longer than a second, and nowhere in its output."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import onward
from onward.cli import main
from onward.commands.table import COMMANDS
from onward.report.phases import Phases
from tests.mlp import data, save_mlp
from tests.test_cli import workplace  # noqa: F401

LASTS_SECONDS = 0.6

SLOW = [
    ("create gpt2 -o new.onnx --size tiny", "onward.models.create.create_model", "writing new.onnx"),
    ("inspect mlp.onnx", "onward.lowering.inspection.describe", "inspecting mlp.onnx"),
    ("inspect mlp.onnx", "onward.proposal.summary.describe_proposal", "checking what `onward init` would propose"),
    ("pack data.npz packed", "onward.data.packing.packer.open_arrays", "reading data.npz"),
    ("pack data.npz packed", "onward.data.packing.packer._write_all", "packing 24 samples"),
    ("init mlp.onnx data.npz -o new/run.yaml", "onward.commands.initialization.read_model_facts", "reading mlp.onnx"),
    ("init mlp.onnx data.npz -o new/run.yaml", "onward.commands.initialization.read_data_facts", "reading data.npz"),
    ("init mlp.onnx data.npz -o new/run.yaml", "onward.data.packing.packer._write_all", "packing 24 samples"),
    ("init mlp.onnx data.npz -o new/run.yaml", "onward.commands.initialization.peak_bytes", "forecasting how much"),
    ("init mlp.onnx data.npz -o new/run.yaml", "onward.run.assemble", "building the network"),
    ("plan run.yaml", "onward.commands.planning.read_training_graph", "reading {folder}/mlp.onnx"),
    ("plan run.yaml", "onward.commands.planning.plan_run", "planning the run for 1 ranks"),
    ("plan run.yaml", "onward.commands.planning.forecast", "forecasting memory and communication"),
    ("lr-find run.yaml --steps 10", "onward.commands.rate_search.assemble", "building the network"),
    ("lr-find run.yaml --steps 10", "onward.commands.rate_search.run_range_test", "training 10 updates at rising"),
    (
        "reference run.yaml made --loss.type dpo",
        "onward.commands.reference_shards.read_training_graph",
        "reading {folder}/mlp.onnx",
    ),
    (
        "export mlp.onnx -o new.onnx --quantize fp16",
        "onward.artifacts.trained_model._converted",
        "writing new.onnx",
    ),
    ("export mlp.onnx --run run.yaml --training-graph g.onnx", "onward.artifacts.run_graphs.export_graphs", "writing"),
    ("device run.yaml -o bundle", "onward.device.bundle.write_bundle", "writing bundle"),
    ("doctor --seconds 0.1", "onward.diagnosis.packages.check_packages", "checking installed packages"),
    (
        "doctor --seconds 0.1",
        "onward.diagnosis.communication.check_communication",
        "timing communication between processes",
    ),
]


class Quick(Phases):
    """Announces sooner."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        super().__init__(notify, 0.2)


@pytest.fixture
def here(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    monkeypatch.chdir(workplace)
    np.savez("data.npz", **data(24))
    monkeypatch.setattr("onward.cli.Phases", Quick)
    return workplace


def make_slow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, _, function = name.rpartition(".")
    module = importlib.import_module(place)
    original = getattr(module, function)

    def slow(*arguments: object, **named: object) -> object:
        time.sleep(LASTS_SECONDS)
        return original(*arguments, **named)

    monkeypatch.setattr(module, function, slow)


@pytest.mark.parametrize(("command", "function", "phase"), SLOW)
def test_a_slow_phase_is_announced_on_stderr(
    here: Path,
    command: str,
    function: str,
    phase: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_slow(function, monkeypatch)
    main(command.split())
    shown = capsys.readouterr()
    name = command.split()[0]
    assert f"onward {name}: {phase.format(folder=here)}" in shown.err
    assert " ..." not in shown.out


def test_the_phases_of_a_report(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "run.yaml", "--quiet", "--tensorboard.log_dir", "out"]) == 0
    make_slow("onward.commands.reporting.read_run", monkeypatch)
    make_slow("onward.commands.reporting.render_page", monkeypatch)
    assert main(["report", "out"]) == 0
    told = capsys.readouterr().err
    assert "onward report: reading out ..." in told
    assert "onward report: writing the page ..." in told


def test_every_command_takes_phases() -> None:
    """A new command gets a phase of its own above, or is over at once."""
    with_phases = {command.split()[0] for command, _, _ in SLOW} | {"train", "report"}
    assert set(COMMANDS) - with_phases <= {"help", "completion"}


def test_json_stays_json(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_slow("onward.diagnosis.packages.check_packages", monkeypatch)
    main(["doctor", "--seconds", "0.1", "--json"])
    assert json.loads(capsys.readouterr().out)


def test_nothing_is_announced_after_an_error(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("onward.cli.Phases", Quick)
    assert main(["inspect", "none.onnx"]) == 2
    told = capsys.readouterr().err
    time.sleep(0.4)
    assert told.splitlines()[-1].startswith("onward inspect: model 'none.onnx' does not exist")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("function", ["onward.fitting.fit.open_data", "onward.run.assemble"])
def test_the_phases_of_a_fit(
    tmp_path: Path, function: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("onward.fitting.fit.Phases", Quick)
    monkeypatch.setattr("onward.report.run_watchers.Phases", Quick)
    make_slow(function, monkeypatch)
    arrays, model = data(24), save_mlp(tmp_path)
    for progress in (True, False):
        onward.fit(model, arrays, loss="softmax_cross_entropy", label="label", steps=2, batch_size=4, progress=progress)
        phase = "opening the data" if "open_data" in function else "building the network"
        assert (f"note   {phase} ..." in capsys.readouterr().out) == progress


def test_a_launch_of_two_processes_has_one_first_line(workplace: Path) -> None:  # noqa: F811
    command = [sys.executable, "-m", "onward", "train", "run.yaml", "--distributed.data_parallel_size", "2"]
    write = (workplace / "train").glob("*.pb")
    for shard in list(write)[:1]:
        (workplace / "train" / f"z{shard.name}").write_bytes(shard.read_bytes())
    result = subprocess.run(command, cwd=workplace, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("onward ")] == [f"onward {onward.__version__}   run.yaml"]
    assert sum("importing torch ..." in line for line in lines) <= 1
