"""A run that is killed at any moment and started again ends with the same bits as a run that never was.

Dropout, shuffling, accumulation, fp16 with a dynamic loss scale and checkpoints every other update are all on.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onward.data.shard_writer import ShardWriter
from onward.models import create_model
from tests.initializers import stored_arrays

ROOT = Path(__file__).resolve().parents[2]
LONGEST_SECONDS = 300.0


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its data, and the result of a run that was never killed."""
    folder = tmp_path_factory.mktemp("killed")
    model = create_model("gpt2", size="tiny", layers=1, heads=2, width=16, vocab_size=31, context_length=8, dropout=0.1)
    ir.save(model, folder / "model.onnx")
    (folder / "data").mkdir()
    generator = np.random.default_rng(0)
    for number in range(3):
        with ShardWriter(folder / "data" / f"{number}.pb") as writer:
            for _ in range(13):
                tokens = generator.integers(0, 31, 9)
                writer.write({"input_ids": tokens[:-1], "labels": tokens[1:]})
    with start(folder / "whole") as process:
        assert process.wait(timeout=LONGEST_SECONDS) == 0
    return folder


def start(folder: Path) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.invariants.killed_run", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    model = onnx.load(folder / "model_trained.onnx")
    return stored_arrays(model)


def assert_same_bits(folder: Path, reference: Path) -> None:
    actual, expected = weights_of(folder), weights_of(reference)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(actual[name], value), name
    untrained = stored_arrays(reference.parent / "model.onnx")
    assert any(not np.array_equal(untrained[name], value) for name, value in expected.items())


@pytest.mark.parametrize("most", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_with_sigkill_at_random_moments(workplace: Path, most: int) -> None:
    """`most` kills, from just after the start to the middle of a checkpoint, over as many runs as it takes."""
    moments = random.Random(3)
    kills, attempt = 0, 0
    while kills < most:
        folder = workplace / f"killed-{most}-{attempt}"
        attempt += 1
        finished = False
        while not finished:
            with start(folder) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                if kills < most:
                    time.sleep(moments.uniform(0.0, 0.5))
                    kills += process.poll() is None
                    process.kill()
                finished = process.wait(timeout=LONGEST_SECONDS) == 0
        assert_same_bits(folder, workplace / "whole")


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_next_start_goes_on(workplace: Path, signal_number: signal.Signals) -> None:
    folder = workplace / f"signalled-{signal_number.name}"
    with start(folder) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        while not list((folder / "checkpoints").glob("checkpoint-*")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal_number)
        # The script lets the exception out; `onward train` turns it into exit code 3 (tests/test_cli.py).
        assert process.wait(timeout=LONGEST_SECONDS) == 1
    assert not (folder / "model_trained.onnx").exists()
    with start(folder) as again:
        assert again.wait(timeout=LONGEST_SECONDS) == 0
    assert_same_bits(folder, workplace / "whole")
