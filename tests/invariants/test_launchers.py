"""Whoever starts the processes, `onward train` itself, torchrun, mpirun, or torchrun on two nodes: the same weights.

And whatever happens to one of them: all end soon, the cause is shown once, and the same command continues.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml
from onnx import numpy_helper

from onward.cli import main
from tests.mlp import write_shards
from tests.parallel.starting import LONGEST_SECONDS, environment, mpirun, needs_mpirun, run, torchrun, two_nodes

pytestmark = pytest.mark.slow
RANKS = 4
TRAIN = ["-m", "onward", "train", "run.yaml"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small MNIST network, data for four replicas, and a RUN.yaml that asks for four processes."""
    folder = tmp_path_factory.mktemp("launchers")
    size = ["--image-size", "6", "--hidden", "8"]
    assert main(["create", "mnist", "-o", str(folder / "model.onnx"), *size]) == 0
    graph = onnx.load(folder / "model.onnx").graph
    generator = np.random.default_rng(5)
    images = generator.standard_normal((12 * RANKS, *input_shape(graph))).astype(np.float32)
    labels = generator.integers(0, 10, 12 * RANKS)
    write_shards(folder / "train", {graph.input[0].name: images, "label": labels}, files=RANKS)
    sections = {
        "paths": {"model_path": "model.onnx", "train_data_dir": "train", "output_dir": "out"},
        "loss": {"type": "softmax_cross_entropy", "prediction": graph.output[0].name, "label": "label"},
        "training": {"batch_size": 4, "num_train_steps": 12, "gradient_accumulation_steps": 2, "seed": 3},
        "learning_rate": {"initial_lr": 0.01},
        "optimizer": {"training_optimizer_name": "AdamW", "max_norm_clip": 1.0},
        "checkpoint": {"checkpoints_dir": "out/checkpoints"},
        "distributed": {"data_parallel_size": RANKS, "timeout_seconds": 30.0},
        "machine": {"execution_provider": "CPU", "threads": 1},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(sections))
    return folder


def input_shape(graph: onnx.GraphProto) -> tuple[int, ...]:
    return tuple(dim.dim_value for dim in graph.input[0].type.tensor_type.shape.dim[1:])


def into(output: str) -> list[str]:
    return [f"--paths.output_dir={output}", f"--checkpoint.checkpoints_dir={output}/checkpoints"]


def weights_of(folder: Path) -> dict[str, bytes]:
    graph = onnx.load(folder / "model_trained.onnx").graph
    return {tensor.name: numpy_helper.to_array(tensor).tobytes() for tensor in graph.initializer}


@pytest.fixture(scope="module")
def trained(workplace: Path) -> dict[str, bytes]:
    """The weights of plain `onward train`."""
    done = run([sys.executable, *TRAIN, *into("plain")], workplace)
    assert done.returncode == 0, done.stdout + done.stderr
    before = {t.name: numpy_helper.to_array(t).tobytes() for t in onnx.load(workplace / "model.onnx").graph.initializer}
    after = weights_of(workplace / "plain")
    assert sum(before[name] != after[name] for name in after) >= 2
    assert len(re.findall("trained model written", done.stdout + done.stderr)) == 1
    return after


@pytest.mark.parametrize(
    "launcher", [pytest.param(torchrun, id="torchrun"), pytest.param(mpirun, id="mpirun", marks=needs_mpirun)]
)
def test_launcher_makes_no_difference(launcher: object, workplace: Path, trained: dict[str, bytes]) -> None:
    name = launcher.__name__  # type: ignore[attr-defined]
    done = run([*launcher(RANKS), *TRAIN, *into(name)], workplace)  # type: ignore[operator]
    assert done.returncode == 0, done.stdout + done.stderr
    assert weights_of(workplace / name) == trained


def test_two_nodes_make_no_difference(workplace: Path, trained: dict[str, bytes]) -> None:
    with two_nodes() as nodes:
        place = ["--nnodes", "2", "--master-addr", nodes.addresses[0], "--master-port", "29513"]
        processes = [
            nodes.start(
                node, [*torchrun(RANKS // 2, *place, "--node-rank", str(node)), *TRAIN, *into("nodes")], workplace
            )
            for node in range(2)
        ]
        said = [process.communicate(timeout=LONGEST_SECONDS)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "".join(said)
    assert weights_of(workplace / "nodes") == trained


@pytest.fixture
def long_run(workplace: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Plain `onward train` of many steps, after its first checkpoint."""
    output = workplace / f"long{time.monotonic_ns()}"
    long = ["--training.num_train_steps=200000", "--checkpoint.checkpoint_period=20", *into(output.name)]
    long.append("--distributed.max_restarts=0")
    process = subprocess.Popen(
        [sys.executable, *TRAIN, *long], cwd=workplace, env=environment(), stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + LONGEST_SECONDS
    while not list((output / "checkpoints").glob("*/manifest.json")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield process, output
    process.kill()
    process.wait()


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes that a launcher started, oldest first."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            is_worker = int(fields[1]) == process.pid and b"onward" in (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if is_worker:
            found.append(int(folder.name))
    return sorted(found)


def test_killed_worker_ends_all_and_the_same_command_goes_on(long_run: tuple[subprocess.Popen[str], Path]) -> None:
    process, output = long_run
    os.kill(workers_of(process)[1], signal.SIGKILL)
    killed = time.monotonic()
    _, said = process.communicate(timeout=LONGEST_SECONDS)
    assert process.returncode == 1
    assert time.monotonic() - killed < 20
    assert len(re.findall(r"onward train: rank \d of 4 \(process \d+\) was ended by SIGKILL; all ranks end", said)) == 1
    assert "Traceback" not in said
    more = run([sys.executable, *TRAIN, "--training.num_train_steps=2", *into(output.name)], output.parent)
    assert "resumed from" in more.stdout + more.stderr, more.stderr


@pytest.mark.parametrize("to", ["launcher", "one worker"])
def test_signal_saves_once_on_all_ranks(to: str, long_run: tuple[subprocess.Popen[str], Path]) -> None:
    process, _ = long_run
    os.kill(process.pid if to == "launcher" else workers_of(process)[2], signal.SIGTERM)
    _, said = process.communicate(timeout=LONGEST_SECONDS)
    assert process.returncode == 3, said
    assert len(re.findall(r"onward train: stopped by .+ after step \d+; saved as", said)) == 1
    assert "Traceback" not in said


def test_broken_data_of_one_rank_end_all(workplace: Path, tmp_path: Path) -> None:
    broken = tmp_path / "train"
    broken.mkdir()
    for number, path in enumerate(sorted((workplace / "train").glob("*.pb"))):
        content = path.read_bytes()
        (broken / path.name).write_bytes(content if number != 2 else content[:-7])
    command = [sys.executable, *TRAIN, f"--paths.train_data_dir={broken}", *into("broken")]
    done = run(command, workplace)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("all end.") == 1
    assert "This was rank 2 of 4" in done.stderr


def test_mistake_of_all_ranks_is_shown_once(workplace: Path) -> None:
    command = [sys.executable, *TRAIN, "--loss.prediction=nothing", *into("mistake")]
    done = run(command, workplace)
    assert done.returncode == 2
    assert len(re.findall("onward train: ", done.stderr)) == 1, done.stderr
