"""Sweeps: every combination trained in its own folder, failures and interruptions included, and the table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from onward.cli import main
from onward.commands.sweep import find_members, split_values
from onward.commands.sweep_settings import refuse_changed, write_settings
from onward.errors import ParametersError
from tests.forked_commands import ForkedProcess
from tests.initializers import stored_arrays
from tests.test_cli import ROOT, workplace, write_run  # noqa: F401

RATES = "learning_rate.initial_lr=1e-2,1e-1"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


def test_values_between_commas() -> None:
    assert split_values("1e-4,3e-4") == ["1e-4", "3e-4"]
    assert split_values("[a, b],[c],{x: 1, y: 2}") == ["[a, b]", "[c]", "{x: 1, y: 2}"]
    assert split_values("'a,b',c") == ["'a,b'", "c"]


def test_members_are_all_combinations(workplace: Path) -> None:  # noqa: F811
    asked = [RATES, "training.seed=1,2,3"]
    members = find_members(workplace / "run.yaml", asked, {})
    assert [one.name for one in members][:2] == [
        "learning_rate.initial_lr=1e-2, training.seed=1",
        "learning_rate.initial_lr=1e-2, training.seed=2",
    ]
    assert len({one.folder for one in members}) == len(members) == 6
    assert members[0].folder == workplace / "out" / "sweep" / "learning_rate.initial_lr=1e-2+training.seed=1"


MISTAKES = {
    "learning_rate.initial_lr": r"^--sweep 'learning_rate\.initial_lr' is not understood; expected section\.field",
    "learning_rate.inital_lr=1,2": r"learning_rate\.inital_lr is unknown\. Did you mean 'initial_lr'\?",
    "training.batch_size=4,none": r"training\.batch_size is 'none'",
}


@pytest.mark.parametrize("asked", MISTAKES)
def test_mistakes_are_found_before_the_first_run(workplace: Path, asked: str) -> None:  # noqa: F811
    with pytest.raises(ParametersError, match=MISTAKES[asked]):
        find_members(workplace / "run.yaml", [asked], {})
    with pytest.raises(ParametersError, match=r"^--sweep training\.seed is set twice; list all its values in one"):
        find_members(workplace / "run.yaml", ["training.seed=1,2"], {"training.seed": "3"})
    write_run(workplace, paths={"output_dir": None})
    with pytest.raises(
        ParametersError, match=r"^--sweep needs paths\.output_dir, in which each run writes to its own folder"
    ):
        find_members(workplace / "run.yaml", [RATES], {})


def fork(command: Sequence[str]) -> ForkedProcess:
    """A member, which prints where its sweep does; `command` is the interpreter, `-m`, `onward` and arguments."""
    return ForkedProcess(command[2:], Path.cwd(), output=1, errors=2)


def test_a_sweep_trains_every_member_and_prints_a_table(
    workplace: Path,  # noqa: F811
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of the members fails: its data are not there. The others are trained as they would be alone."""
    monkeypatch.setattr("onward.commands.sweep.subprocess", SimpleNamespace(Popen=fork))
    good, gone = workplace / "train", workplace / "gone"
    code = main(
        [
            "train",
            str(workplace / "run.yaml"),
            "--sweep",
            RATES,
            "--sweep",
            f"paths.train_data_dir={good},{gone}",
            "--quiet",
        ]
    )
    said = capfd.readouterr()
    assert "sweep  1 of 4" not in said.out
    assert code == 1
    assert "2 of 4 runs failed, each with its message above; the others are done." in said.err
    assert "gone' does not exist" in said.err
    head, *rows = [line for line in said.out.splitlines() if line.startswith(("learning_rate", "1e-"))]
    assert head.split()[:2] == ["learning_rate.initial_lr", "paths.train_data_dir"]
    assert [row.split()[-1] for row in rows] == ["done", "failed", "done", "failed"]
    done = sorted((workplace / "out" / "sweep").glob("*/mlp_trained.onnx"))
    assert len(done) == 2
    losses = {json.loads((path.parent / "run.json").read_text())["rounds"][0]["last_loss"] for path in done}
    assert len(losses) == 2
    assert main(["train", str(workplace / "run.yaml"), "--learning_rate.initial_lr", "1e-2"]) == 0
    alone, swept = (stored_arrays(path) for path in (workplace / "out" / "mlp_trained.onnx", done[1]))
    assert all((alone[name] == swept[name]).all() for name in alone)


def test_an_interrupted_sweep_resumes(workplace: Path) -> None:  # noqa: F811
    """The first member is done, the second interrupted; the same command trains what is left."""
    run = str(write_run(workplace, training={"num_train_steps": 8, "display_loss_steps": 1}))
    command = [sys.executable, "-m", "onward", "train", run, "--sweep", "training.num_train_steps=8,1000000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True
    ) as process:
        assert process.stdout is not None
        ends = time.monotonic() + 120
        for line in process.stdout:
            if "/1000000" in line:
                break
            assert time.monotonic() < ends
        os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it to all of them
        rest = process.stdout.read()
        assert process.wait(timeout=120) == 3, rest
    command[-1] = "training.num_train_steps=8,1000000"
    states = {
        path.name: json.loads((path / "run.json").read_text())["status"] for path in (workplace / "out/sweep").iterdir()
    }
    assert sorted(states.values()) == ["done", "interrupted"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True
    ) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if "resumed from" in line:
                break
        os.killpg(process.pid, signal.SIGKILL)
    told = [line for line in said if not line.startswith("note   reading ")]  # a slow machine tells what takes long
    assert told[0] == "sweep  1 of 2: training.num_train_steps=8, already done\n"


def test_runs_with_other_settings_are_not_taken_as_done(
    workplace: Path,  # noqa: F811
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """RUN.yaml changes between two calls: refused, with the fields; the same settings, or others elsewhere,
    continue.
    """
    monkeypatch.setattr("onward.commands.sweep.subprocess", SimpleNamespace(Popen=fork))
    command = ["train", str(workplace / "run.yaml"), "--sweep", "learning_rate.initial_lr=1e-2,1e-1"]
    assert main(command) == 0
    models = sorted((workplace / "out" / "sweep").glob("*/mlp_trained.onnx"))
    written = [path.stat().st_mtime_ns for path in models]
    assert len(models) == 2
    capfd.readouterr()
    write_run(workplace, training={"seed": 5}, optimizer={"training_optimizer_name": "SGDOptimizer"})
    assert main(command) == 2
    said = capfd.readouterr()
    assert "2 of the 2 runs of this sweep were trained with other settings: " in said.err
    assert "training.seed was " in said.err
    assert ", is now 5" in said.err
    assert "Pass another --paths.output_dir, or delete '" in said.err
    assert "already done" not in said.out
    assert [path.stat().st_mtime_ns for path in models] == written
    assert main([*command, "--dry-run"]) == 0
    assert main([*command, "--paths.output_dir", str(workplace / "elsewhere")]) == 0
    assert len(list((workplace / "elsewhere" / "sweep").glob("*/mlp_trained.onnx"))) == 2
    capfd.readouterr()
    write_run(workplace, training={"display_loss_steps": 3})
    assert main(command) == 0
    assert capfd.readouterr().out.count(", already done") == 2
    assert main([*command, "--json"]) == 0
    said = capfd.readouterr()
    assert (said.out, said.err.count("done")) == ("", 2)


def test_a_run_that_failed_begins_anew_with_other_settings(workplace: Path) -> None:  # noqa: F811
    folder, settings = workplace / "sweep" / "seed=1", {"training.seed": 1, "training.batch_size": 4}
    write_settings(folder, settings)
    for status, is_refused in (("done", True), ("interrupted", True), ("running", True), ("failed", False)):
        (folder / "run.json").write_text(json.dumps({"status": status}))
        refuse_changed({folder: settings})
        if is_refused:
            with pytest.raises(ParametersError, match=r"1 of the 1 runs .* training\.batch_size was 4, is now 8"):
                refuse_changed({folder: {**settings, "training.batch_size": 8}})
        else:
            refuse_changed({folder: {**settings, "training.batch_size": 8}})
