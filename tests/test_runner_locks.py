"""Two runs in one folder: the second is refused before it writes anything, and the first one continues untouched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from onward.cli import main
from tests.mlp import CROSS_ENTROPY, data, save_mlp, write_shards


def write_run(folder: Path, steps: int) -> str:
    """A RUN.yaml that trains into `out`."""
    if not (folder / "train").exists():
        save_mlp(folder)
        write_shards(folder / "train", data(30))
    run = {
        "paths": {"model_path": "mlp.onnx", "train_data_dir": "train", "output_dir": "out"},
        "loss": dict(CROSS_ENTROPY),
        "training": {"batch_size": 4, "num_train_steps": steps},
        "learning_rate": {"initial_lr": 0.1},
        "checkpoint": {"checkpoints_dir": "checkpoints", "checkpoint_period": 50},
    }
    (folder / f"run-{steps}.yaml").write_text(yaml.safe_dump(run))
    return str(folder / f"run-{steps}.yaml")


def state_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_second_run_in_a_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "onward", "train", write_run(tmp_path, 10**9), "--quiet"]
    first = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        end = time.monotonic() + 240
        while not list((tmp_path / "checkpoints").glob("checkpoint-*")):
            assert time.monotonic() < end
            assert first.poll() is None
            time.sleep(0.05)
        first.send_signal(signal.SIGSTOP)  # so that two looks at its files can be compared
        os.waitpid(first.pid, os.WUNTRACED)  # until then it may go on writing
        before = state_of(tmp_path)
        assert main(["train", write_run(tmp_path, 10**9), "--quiet"]) == 2
        said = capsys.readouterr().err
        assert "is in use: onward train" in said
        assert f"process {first.pid}, since" in said
        assert main(["train", write_run(tmp_path, 10**9), "--quiet", "--checkpoint.checkpoints_dir=other"]) == 2
        after = state_of(tmp_path)
        assert {name: after[name] for name in before} == before
        assert set(after) == set(before)
        first.send_signal(signal.SIGCONT)
        first.send_signal(signal.SIGTERM)
        assert first.wait(120) == 3, "the first one saves and ends as ever"
    finally:
        first.kill()
        first.wait()
    assert not list(tmp_path.rglob("*onward-lock*"))
