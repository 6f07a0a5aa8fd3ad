"""Ranks of a training that are killed, fail or do not fit together: all stop soon with one cause, and nothing is lost.

Under torch's elastic launcher training continues by itself, and ends with the bits of a run that was never killed.
"""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

from onward.cli import main
from tests.invariants.elastic import (
    TRAIN,
    checkpoints,
    into,
    make_workplace,
    train_through_kills,
    train_undisturbed,
    untrained,
    weights_of,
)
from tests.parallel.starting import run, torchrun

pytestmark = pytest.mark.slow
RANKS, KILLS = 2, 3


def test_killed_ranks_start_again_and_end_with_the_same_bits(tmp_path: Path) -> None:
    """`benchmarks/killed_ranks.py` kills twenty, also without ZeRO."""
    workplace = make_workplace(tmp_path, RANKS, zero_stage=2)
    done = train_undisturbed(workplace, "whole", RANKS)
    assert done.returncode == 0, done.stderr
    expected, before = weights_of(workplace / "whole"), untrained(workplace)
    assert all(expected[name] != before[name] for name in ("w1", "b1", "w2", "b2"))
    kills, said = train_through_kills(workplace, "killed", RANKS, KILLS, seed=5)
    assert kills == KILLS
    assert said.count("resumed from") >= 1
    assert weights_of(workplace / "killed") == expected


@pytest.fixture
def two_replicas(tmp_path: Path) -> Path:
    return make_workplace(tmp_path, RANKS)


def test_a_shard_that_breaks_on_one_rank_leaves_the_last_checkpoint_whole(two_replicas: Path) -> None:
    """The fourth file belongs to the second rank, and is read when the run has saved already."""
    last = sorted((two_replicas / "train").glob("*.pb"))[-1]
    last.write_bytes(last.read_bytes()[:-7])
    often = ["--checkpoint.checkpoint_period=1", "--data.shuffle_data=false", "--data.max_num_files_preload=1"]
    started = time.monotonic()
    done = run([*torchrun(RANKS), *TRAIN, *often, *into("broken")], two_replicas)
    assert done.returncode != 0
    assert time.monotonic() - started < 60
    assert len(re.findall(r"onward train: ", done.stderr)) == 1, done.stderr
    assert "This was rank 1 of 2" in done.stderr
    assert last.name in done.stderr
    assert checkpoints(two_replicas / "broken")
    command = ["export", "mlp.onnx", "--checkpoint", "broken/checkpoints", "-o", "half.onnx"]
    exported = [str(two_replicas / word) if "." in word or "/" in word else word for word in command]
    assert main(exported) == 0
    assert (two_replicas / "half.onnx").exists()


def test_ranks_with_different_models_are_refused_at_the_start(two_replicas: Path) -> None:
    """Every rank reads its own model; that of the second has one other number."""
    for rank in range(RANKS):
        shutil.copytree(two_replicas / "train", two_replicas / f"node{rank}" / "train")
        model = onnx.load(two_replicas / "mlp.onnx")
        tensor = next(t for t in model.graph.initializer if t.name == "w1")
        array = onnx.numpy_helper.to_array(tensor).copy()
        array[0, 0] += np.float32(rank)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, "w1"))
        onnx.save(model, two_replicas / f"node{rank}" / "mlp.onnx")
        shutil.copy(two_replicas / "run.yaml", two_replicas / f"node{rank}")
    script = two_replicas / "start.py"
    script.write_text(
        "import os, sys, runpy\n"
        "os.chdir('node' + os.environ['RANK'])\n"
        "sys.argv = ['onward', 'train', 'run.yaml']\n"
        "runpy.run_module('onward', run_name='__main__')\n"
    )
    started = time.monotonic()
    done = run([*torchrun(RANKS), str(script)], two_replicas)
    assert done.returncode != 0
    assert time.monotonic() - started < 60
    assert len(re.findall(r"onward train: ", done.stderr)) == 1, done.stderr
    assert re.search(r"model: \w+\.\.\. on rank 0, \w+\.\.\. on rank 1", done.stderr), done.stderr
    assert not list(two_replicas.glob("node*/out/mlp_trained.onnx"))
