"""Options of `onward train`: what is shown where, dry runs, the record of a run, SIGUSR1."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from onward.cli import main
from onward.parameters import Parameters
from tests.forked_commands import ForkedProcess
from tests.test_cli import ROOT, workplace, write_run  # noqa: F401

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


@pytest.fixture(autouse=True)
def signals_as_before() -> Any:
    """A run ignores SIGUSR1 where nothing can be saved, to the end of its process."""
    before, handlers = signal.getsignal(signal.SIGUSR1), list(logging.getLogger("onward").handlers)
    yield
    signal.signal(signal.SIGUSR1, before)
    logging.getLogger("onward").handlers[:] = handlers


@pytest.fixture
def run_file(workplace: Path) -> str:  # noqa: F811
    return str(write_run(workplace, training={"evaluation_period": 4, "display_loss_steps": 4}))


def test_the_first_line_comes_before_torch(run_file: str) -> None:
    code = f"""
import sys
class Stream:
    encoding = "utf-8"
    def isatty(self): return False
    def flush(self): pass
    def write(self, text):
        assert "torch" not in sys.modules, "torch is imported before the first line"
        sys.stderr.write(text)
        raise SystemExit(7)
sys.stdout = Stream()
import onward.cli
onward.cli.main(["train", {run_file!r}])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
    assert done.returncode == 7, done.stderr
    assert done.stderr.startswith("onward 0.")


def test_a_run_imports_only_what_it_uses(run_file: str) -> None:
    """Up to the first step; `torch._dynamo`, SymPy and DTensor are imported by torch's fake tensors."""
    code = f"""
import os, sys
from onward.engine.steps import Steps
def first(self, *arguments, **named):
    result = update(self, *arguments, **named)
    sys.stderr.write(" ".join(sys.modules))
    sys.stderr.flush()
    os._exit(7)
update, Steps.update = Steps.update, first
from onward.cli import process
sys.argv = ["onward", "train", {run_file!r}, "--quiet"]
process()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
    assert done.returncode == 7, done.stderr
    imported = set(done.stderr.split())
    assert "onward.engine.steps" in imported
    packages = {name.partition(".")[0] for name in imported}
    unused = {"PIL", "IPython", "jinja2", "matplotlib", "onnxruntime", "onnxscript", "pandas", "pyarrow", "sklearn"}
    assert sorted(packages & {*unused, "safetensors", "tokenizers", "torchvision", "transformers"}) == []
    modules = {
        "onward.commands.dry_run",
        "onward.commands.layout_search",
        "onward.plan.search.choosing",
        "onward.proposal",
        "torch.distributed.checkpoint",
        "torch.distributed.elastic",
        "torch.distributed.pipelining",
    }
    assert sorted(imported & modules) == []


def test_json_is_an_object_a_line(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", run_file, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [one["kind"] for one in lines]
    assert kinds.count("step") == 3
    assert kinds.count("evaluation") == 2
    assert kinds.count("end") == 1
    assert kinds[-1] == "message"
    assert lines[kinds.index("end")]["steps"] == 8


def test_the_only_evaluation_is_before_the_summary(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", run_file, "--json", "--training.evaluation_period=0"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [one["kind"] for one in lines]
    assert kinds.count("evaluation") == 1
    assert kinds.index("evaluation") < kinds.index("end")
    assert lines[kinds.index("end")]["metrics"] == lines[kinds.index("evaluation")]["metrics"]


def test_quiet_prints_nothing_but_what_went_wrong(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", run_file, "--quiet"]) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "")
    capsys.readouterr()
    again = ["--checkpoint.checkpoints_dir=null", "--learning_rate.initial_lr=1e38", "--training.display_loss_steps=1"]
    assert main(["train", run_file, "--quiet", *again]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "WARNING onward: the loss is nan at step" in said.err


@pytest.mark.parametrize(("level", "expected"), [("info", {"INFO"}), ("debug", {"INFO", "DEBUG"}), ("error", set())])
def test_the_log_level_decides_what_is_logged(
    run_file: str, level: str, expected: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", run_file, "--log-level", level]) == 0
    said = capsys.readouterr()
    assert {line.split()[2] for line in said.err.splitlines() if " onward: " in line} == expected
    assert said.out.count("train  step 8/8") == said.out.count("summary") == 1
    if level != "error":
        assert "INFO onward: evaluation at step 8: loss" in said.err
    if level == "debug":
        assert "DEBUG onward: step 8 of 8: loss" in said.err


def test_a_dry_run_writes_nothing(workplace: Path, run_file: str, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    before = {path: path.stat().st_mtime_ns for path in workplace.rglob("*")}
    extra = ["--tensorboard.log_dir", str(workplace / "out/tb"), "--training.gradient_accumulation_steps", "2"]
    assert main(["train", run_file, "--dry-run", *extra]) == 0
    assert {path: path.stat().st_mtime_ns for path in workplace.rglob("*")} == before
    said = capsys.readouterr().out
    assert "dry run: one update of 8 samples took" in said
    assert "the run has 4 updates." in said
    assert "dry run: the test data fit the model." in said
    assert f"the trained model to {workplace / 'out'}" in said
    assert said.rstrip().endswith("dry run: nothing was written.")


def test_a_dry_run_fails_as_the_run_would(workplace: Path, run_file: str, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert main(["train", run_file, "--dry-run", "--loss.label", "lable"]) == 2
    assert "the data have no feature 'lable'" in capsys.readouterr().err
    assert not (workplace / "out").exists()


COMPARED = ("--early_stopping.patience=2", "--training.evaluation_period=4")
REFUSED_LATER = {
    "a metric that nothing computes": (("--early_stopping.metric=acc",), "early_stopping.metric is 'acc', which"),
    "nothing to compare": (("--paths.test_data_dir=null",), "compare evaluations, but there are no test data."),
    "nothing to export": (
        ("--paths.test_data_dir=null", "--checkpoint.checkpoints_dir=c", "--checkpoint.keep_best=true",
         "--checkpoint.export=best", "--early_stopping.patience=null"),
        "compare evaluations, but there are no test data.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED_LATER)
def test_a_dry_run_compares_evaluations_as_the_run_would(
    case: str,
    workplace: Path,  # noqa: F811
    run_file: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    changed, words = REFUSED_LATER[case]
    assert main(["train", run_file, "--dry-run", *COMPARED, *changed]) == 2
    assert words in capsys.readouterr().err
    assert not (workplace / "out").exists()


def test_a_run_leaves_its_record(workplace: Path, run_file: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    for command in (
        ["init", "-q"],
        ["add", "run.yaml"],
        ["-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "c"],
    ):
        subprocess.run(["git", "-C", str(workplace), *command], check=True)
    commit = subprocess.run(
        ["git", "-C", str(workplace), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    monkeypatch.setattr(sys, "argv", ["onward", "train", "run.yaml", "--training.seed", "3"])
    board = workplace / "out" / "tb"
    assert main(["train", run_file, "--training.seed", "3", "--tensorboard.log_dir", str(board)]) == 0
    record = json.loads((workplace / "out" / "run.json").read_text())
    assert record["status"] == "done"
    assert record["command"] == ["onward", "train", "run.yaml", "--training.seed", "3"]
    assert record["git"]["commit"] == commit
    assert record["git"]["is_dirty"] is False
    assert record["packages"]["torch"]
    assert record["device"] == "cpu"
    assert record["metrics"]["step"] == 8
    assert record["rounds"][0]["steps"] == 8
    resolved = yaml.safe_load((workplace / "out" / "resolved.yaml").read_text())
    assert resolved["training"]["seed"] == 3
    assert resolved["training"]["display_loss_steps"] == 4
    again = Parameters.from_mapping(resolved)
    assert again == Parameters.load(run_file, {"training.seed": "3", "tensorboard.log_dir": str(board)})
    events = EventAccumulator(str(board)).Reload()
    assert {"run/resolved.yaml/text_summary", "run/run.json/text_summary"} <= set(events.Tags()["tensors"])
    hparams = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"training.seed" in hparams
    assert b"learning_rate.initial_lr" in hparams
    (workplace / "run.yaml").write_text((workplace / "run.yaml").read_text() + "\n# changed\n")
    assert main(["train", run_file]) == 0
    record = json.loads((workplace / "out" / "run.json").read_text())
    assert record["git"]["is_dirty"] is True
    assert len(record["resumed"]) == 1


def test_a_failed_run_says_so_in_its_record(workplace: Path, run_file: str) -> None:  # noqa: F811
    (workplace / "train" / "1.pb").write_bytes((workplace / "train" / "1.pb").read_bytes()[:-3])
    assert main(["train", run_file]) == 2
    assert json.loads((workplace / "out" / "run.json").read_text())["status"] == "failed"


def start(run: str, *more: str, **variables: str) -> ForkedProcess:
    command = ["onward", "train", run, "--training.num_train_steps", "1000000", *more]
    return ForkedProcess(command, Path.cwd(), variables=variables)


def read_until(process: ForkedProcess, words: str) -> str:
    """Lines up to the first that holds the words."""
    lines, ends = [], time.monotonic() + 120
    while time.monotonic() < ends:
        line = process.stdout.readline()
        assert line, "".join(lines)
        lines.append(line)
        if words in line:
            return "".join(lines)
    raise AssertionError("".join(lines))


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_sigusr1_saves_and_goes_on(run_file: str, processes: int) -> None:
    with start(run_file, f"--distributed.data_parallel_size={processes}", "--training.evaluation_period=0") as process:
        read_until(process, "train  step")
        process.send_signal(signal.SIGUSR1)
        said = read_until(process, "saved  step")
        assert "saving a checkpoint; training continues." in said
        read_until(process, "train  step")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 3


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_sigusr1_of_slurm_saves_ends_and_says_how_to_requeue(run_file: str, processes: int) -> None:
    asked = ["--checkpoint.on_sigusr1=stop", "--checkpoint.grace_seconds=60", "--training.evaluation_period=0"]
    sizes = f"--distributed.data_parallel_size={processes}"
    with start(run_file, sizes, *asked, SLURM_JOB_ID="712") as process:
        read_until(process, "train  step")
        began = time.monotonic()
        process.send_signal(signal.SIGUSR1)
        said = read_until(process, "scontrol requeue 712")
        assert process.wait(timeout=60) == 3
        assert time.monotonic() - began < 60
    assert re.search(r"stopped by (SIGUSR1|a signal to another process) after step \d+; saved as \S+checkpoint-", said)
    assert f"The same command resumes from there: onward train {run_file} " in said


def test_sigusr1_without_a_folder_says_what_to_set(run_file: str) -> None:
    with start(run_file, "--checkpoint.checkpoints_dir=null") as process:
        read_until(process, "train  step")
        process.send_signal(signal.SIGUSR1)
        said = read_until(process, "SIGUSR1")
        assert "nothing is saved, because checkpoint.checkpoints_dir is not set. Set it to the folder" in said
        read_until(process, "train  step")
