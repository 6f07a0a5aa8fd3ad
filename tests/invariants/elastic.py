"""A small run of several ranks under torchrun, which starts all of them again when one is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import yaml
from onnx import numpy_helper

from tests.mlp import data, save_mlp, write_shards
from tests.parallel.starting import environment, torchrun

LONGEST_SECONDS = 300.0
TRAIN = ["-m", "onward", "train", "run.yaml"]


def make_workplace(folder: Path, ranks: int, steps: int = 600, **distributed: Any) -> Path:
    """An MLP with dropout, shards for every replica, and a RUN.yaml: fp16 with a dynamic loss scale, accumulation."""
    save_mlp(folder, dropout=0.1)
    write_shards(folder / "train", data(26 * ranks), files=2 * ranks)
    sections: dict[str, Mapping[str, Any]] = {
        "paths": {"model_path": "mlp.onnx", "train_data_dir": "train", "output_dir": "out"},
        "data": {"shuffle_data": True},
        "loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "label"},
        "training": {"batch_size": 4, "num_train_steps": steps, "gradient_accumulation_steps": 2, "seed": 3},
        "learning_rate": {"initial_lr": 1e-3, "warmup_mode": "cosine", "warmup_steps": 100},
        "optimizer": {"training_optimizer_name": "AdamW", "max_norm_clip": 1.0},
        "mixed_precision": {"use_mixed_precision": True, "loss_scale": 0},
        "checkpoint": {"checkpoints_dir": "checkpoints", "checkpoint_period": 10, "max_num_checkpoints": 2},
        "distributed": {"data_parallel_size": ranks, "timeout_seconds": 60.0, **distributed},
        "machine": {"execution_provider": "CPU", "threads": 1},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(sections))
    return folder


def into(output: str) -> list[str]:
    return [f"--paths.output_dir={output}", f"--checkpoint.checkpoints_dir={output}/checkpoints"]


def weights_of(folder: Path) -> dict[str, bytes]:
    graph = onnx.load(folder / "mlp_trained.onnx").graph
    return {tensor.name: numpy_helper.to_array(tensor).tobytes() for tensor in graph.initializer}


def checkpoints(folder: Path) -> set[str]:
    """Names of the complete ones."""
    return {path.parent.name for path in (folder / "checkpoints").glob("*/manifest.json")}


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The workers that torchrun started, oldest first."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == process.pid and b"onward" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return sorted(found)


def train_through_kills(folder: Path, output: str, ranks: int, kills: int, seed: int) -> tuple[int, str]:
    """Runs to the end while one rank after the other is killed.

    Every second kill comes within half a second after a new checkpoint; the others at any moment, also while the ranks
    still find each other.

    Returns:
        How many were killed, and what was said.
    """
    moments = random.Random(seed)
    command = [*torchrun(ranks, "--max-restarts", str(kills + 1), "--monitor-interval", "0.1"), *TRAIN, *into(output)]
    with (folder / f"{output}.log").open("w+") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment(), stdout=log, stderr=log, text=True)
        done, last = 0, set[int]()
        try:
            while done < kills and process.poll() is None:
                workers = _next_workers(process, ranks, last)
                before, since = checkpoints(folder / output), time.monotonic()
                if done % 2 == 0:
                    _wait(lambda: bool(checkpoints(folder / output) - before) or process.poll() is not None)  # noqa: B023
                    time.sleep(moments.uniform(0, 0.5))
                else:
                    time.sleep(moments.uniform(0, 6.0))
                if process.poll() is None and set(workers_of(process)) == set(workers):
                    os.kill(moments.choice(workers), signal.SIGKILL)
                    done += 1
                last |= set(workers)
                assert time.monotonic() - since < LONGEST_SECONDS
            code = process.wait(timeout=LONGEST_SECONDS)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        said = log.read()
    assert code == 0, said[-3000:]
    return done, said


def _next_workers(process: subprocess.Popen[str], ranks: int, last: set[int]) -> list[int]:
    """All ranks, none of which was there before."""
    found: list[int] = []

    def are_there() -> bool:
        nonlocal found
        found = workers_of(process)
        return process.poll() is not None or (len(found) == ranks and not last & set(found))

    _wait(are_there)
    return found


def _wait(condition: Any) -> None:
    deadline = time.monotonic() + LONGEST_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def train_undisturbed(folder: Path, output: str, ranks: int) -> subprocess.CompletedProcess[str]:
    """The same run, never killed."""
    return subprocess.run(
        [*torchrun(ranks), *TRAIN, *into(output)], cwd=folder, env=environment(), capture_output=True, text=True,
        timeout=LONGEST_SECONDS, check=False,
    )  # fmt: skip


def untrained(folder: Path) -> dict[str, bytes]:
    graph = onnx.load(folder / "mlp.onnx").graph
    return {tensor.name: np.ascontiguousarray(numpy_helper.to_array(tensor)).tobytes() for tensor in graph.initializer}
