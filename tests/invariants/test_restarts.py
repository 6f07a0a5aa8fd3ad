"""`onward train` restarts its own workers after whatever ended them, with the cause in the log, to the same bits.

What ends them comes from `faulty/sitecustomize.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest
import yaml
from onnx import numpy_helper

from onward.operating_system import is_running
from tests.invariants.elastic import LONGEST_SECONDS, TRAIN, checkpoints, into, make_workplace, weights_of, workers_of
from tests.mlp import build_mlp
from tests.parallel.starting import ROOT, environment

pytestmark = pytest.mark.slow
FAULTY = str(Path(__file__).with_name("faulty"))
STEPS = 60


def change(folder: Path, section: str, **fields: object) -> None:
    sections = yaml.safe_load((folder / "run.yaml").read_text())
    sections[section] = {**sections.get(section, {}), **fields}
    (folder / "run.yaml").write_text(yaml.safe_dump(sections))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two replicas; a checkpoint after every fifth of thirty updates."""
    folder = make_workplace(tmp_path_factory.mktemp("restarts"), 2, STEPS)
    change(folder, "learning_rate", warmup_steps=10)
    change(folder, "checkpoint", checkpoint_period=5)
    change(folder, "tensorboard", log_dir="logs")
    change(folder, "distributed", timeout_seconds=6.0)
    return folder


@pytest.fixture(scope="module")
def undisturbed(workplace: Path) -> dict[str, bytes]:
    done = train(workplace, "whole")
    assert done.returncode == 0, done.stderr
    return weights_of(workplace / "whole")


def train(folder: Path, output: str, fault: str = "", *options: str) -> subprocess.CompletedProcess[str]:
    logs = [f"--tensorboard.log_dir={output}/logs"]
    return subprocess.run(
        [sys.executable, *TRAIN, *into(output), *logs, *options], cwd=folder, env=faulty_environment(fault),
        capture_output=True, text=True, timeout=LONGEST_SECONDS, check=False,
    )  # fmt: skip


def faulty_environment(fault: str) -> dict[str, str]:
    paths = {"PYTHONPATH": f"{FAULTY}:{ROOT / 'src'}:{ROOT}"}
    return environment(**paths, FAULT=fault) if fault else environment()


def messages(folder: Path) -> list[str]:
    """What the run's own log tells."""
    lines = [json.loads(line) for line in (folder / "logs" / "metrics.jsonl").read_text().splitlines()]
    return [str(line) for line in lines if "restarted" in str(line)]


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("kill", r"rank 1 of 2 (process"),
        ("bug", "a bug"),
        ("hang", "No heartbeat from rank 1"),
        ("stop", "which is stopped by a signal (SIGSTOP)"),
    ],
)
def test_workers_are_restarted_and_end_with_the_same_bits(
    kind: str, cause: str, workplace: Path, undisturbed: dict[str, bytes]
) -> None:
    done = train(workplace, kind, f"{kind},1,12,{kind}.once")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("onward train: restarting all ranks from checkpoint-000000") == 1, done.stderr
    assert "(restart 1 of 3 without progress)." in done.stderr
    assert cause in done.stderr
    assert "resumed from" in done.stdout
    (logged,) = messages(workplace / kind)
    assert cause in logged
    assert weights_of(workplace / kind) == undisturbed
    files = list((workplace / kind).glob("hang_*.txt"))
    assert len(files) == (kind in ("hang", "stop"))
    for file in files:
        assert str(file.relative_to(workplace)) in done.stderr


def test_an_error_that_comes_back_is_not_tried_for_ever(workplace: Path) -> None:
    done = train(workplace, "again", "bug,1,3")
    assert done.returncode == 1
    assert done.stderr.count("restarting all ranks from the beginning") == 1, done.stderr
    assert "not restarted: the same error occurred again at the same point (from the beginning, then" in done.stderr


@pytest.mark.parametrize(("fault", "options", "code"), [("mistake,1,3", (), 2), ("kill,1,3", ("0",), 1)])
def test_mistakes_are_not_restarted_and_nothing_is_where_that_is_asked_for(
    fault: str, options: tuple[str, ...], code: int, workplace: Path
) -> None:
    asked = [f"--distributed.max_restarts={number}" for number in options]
    done = train(workplace, f"final{code}", fault, *asked)
    assert done.returncode == code
    assert "restarting all ranks" not in done.stderr


@pytest.mark.parametrize("replicas", [1, 2])
def test_out_of_memory_halves_the_micro_batch_and_an_update_keeps_its_samples(replicas: int, workplace: Path) -> None:
    """From micro-batches of 4, 2 an update, to 2 and 4 (after an odd update) to the end; near the run without that."""
    options = [
        f"--distributed.data_parallel_size={replicas}", "--training.halve_batch_on_out_of_memory=true",
        "--mixed_precision.use_mixed_precision=false", "--paths.model_path=plain.onnx",
    ]  # fmt: skip
    onnx.save(build_mlp(), workplace / "plain.onnx")
    name = f"memory{replicas}"
    done = train(workplace, name, f"memory2,{replicas - 1},12", *options)
    assert done.returncode == 0, done.stderr
    assert "memory ran out in step 25, with micro-batches of 4 samples: CUDA out of memory" in done.stderr
    update = 12 if replicas == 1 else 10  # a process alone saves what it has when a step fails
    assert f"from checkpoint-{update:08} with micro-batches of 2 samples instead of 4" in done.stderr
    assert f"step {2 * update}, with 2 micro-batches of 4 samples an update, is step {4 * update} with 4" in done.stdout
    once = train(workplace, f"{name}-whole", "", *options)
    assert once.returncode == 0, once.stderr
    found, expected = weights_of_plain(workplace / name), weights_of_plain(workplace / f"{name}-whole")
    for weight in expected:
        np.testing.assert_allclose(found[weight], expected[weight], rtol=1e-4, atol=1e-6)
    again = train(workplace, name, "memory2,0,1", *options, "--training.num_train_steps=80")
    assert again.returncode == 0, again.stderr
    assert "restarting all ranks" not in again.stderr


def weights_of_plain(folder: Path) -> dict[str, np.ndarray]:
    graph = onnx.load(folder / "plain_trained.onnx").graph
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}


def test_a_rank_that_was_stopped_for_a_while_continues(workplace: Path, undisturbed: dict[str, bytes]) -> None:
    process, workers = begin(workplace, "paused", "--distributed.timeout_seconds=60")
    os.kill(workers[1], signal.SIGSTOP)
    time.sleep(4.0)
    os.kill(workers[1], signal.SIGCONT)
    _, said = process.communicate(timeout=LONGEST_SECONDS)
    assert process.returncode == 0, said
    assert "restarting all ranks" not in said
    assert weights_of(workplace / "paused") == undisturbed


def test_sigterm_to_one_rank_saves_and_is_not_restarted(workplace: Path, undisturbed: dict[str, bytes]) -> None:
    process, workers = begin(workplace, "asked", "--training.num_train_steps=60000")
    os.kill(workers[1], signal.SIGTERM)
    _, said = process.communicate(timeout=LONGEST_SECONDS)
    assert process.returncode == 3, said
    assert "restarting all ranks" not in said
    assert not any(is_running(worker) for worker in workers)


@pytest.mark.parametrize("moment", ["training", "start-up"])
def test_a_killed_launcher_leaves_nobody_behind(moment: str, workplace: Path) -> None:
    options = ["--training.num_train_steps=60000"]
    process, workers = begin(workplace, f"orphans in {moment}", *options, waits_for_checkpoint=moment == "training")
    assert len(workers) == 2
    process.kill()
    deadline = time.monotonic() + 90  # workers import torch to the end first
    while alive := [worker for worker in workers if is_running(worker)]:
        told = ["pid", "status", "cpu_times", "num_threads"]  # still importing, or waiting
        assert time.monotonic() < deadline, [psutil.Process(worker).as_dict(told) for worker in alive]
        time.sleep(0.1)
    process.communicate()


def begin(
    folder: Path, output: str, *options: str, waits_for_checkpoint: bool = True
) -> tuple[subprocess.Popen[str], list[int]]:
    """A run after its first checkpoint, or as soon as it has workers, and these."""
    command = [sys.executable, *TRAIN, *into(output), f"--tensorboard.log_dir={output}/logs", *options]
    process = subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + LONGEST_SECONDS
    while not (checkpoints(folder / output) if waits_for_checkpoint else len(workers_of(process)) == 2):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process, workers_of(process)
