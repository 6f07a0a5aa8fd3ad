"""A run that is killed at any moment and started again ends with the same bits as a run that never was.

Dropout, shuffling, accumulation, fp16 with a dynamic loss scale and checkpoints every other update are all on.
"""

from __future__ import annotations

import os
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onward.data.shard_writer import ShardWriter
from onward.models import create_model
from tests.initializers import stored_arrays
from tests.invariants import killed_run
from tests.ranks import _CONTEXT

KILLS = 20
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
    assert exit_code_of(start(folder / "whole")) == 0
    return folder


def start(folder: Path) -> BaseProcess:
    """A run in a folder, which it goes on with if it has begun there."""
    folder.mkdir(exist_ok=True)
    (folder / "ready").unlink(missing_ok=True)
    process = _CONTEXT.Process(target=killed_run.main, args=(folder,), daemon=True)
    process.start()
    return process


def wait_for(process: BaseProcess, folder: Path, pattern: str) -> None:
    """Until something of that name is there."""
    while not list(folder.glob(pattern)):
        assert process.exitcode is None
        time.sleep(0.005)


def exit_code_of(process: BaseProcess) -> int | None:
    process.join(LONGEST_SECONDS)
    return process.exitcode


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


def test_killed_with_sigkill_at_random_moments(workplace: Path) -> None:
    """Twenty kills, from just after the start to the middle of a checkpoint, over as many runs as it takes."""
    moments = random.Random(3)
    kills, attempt = 0, 0
    while kills < KILLS:
        folder = workplace / f"killed-{attempt}"
        attempt += 1
        finished = False
        while not finished:
            process = start(folder)
            wait_for(process, folder, "ready")
            if kills < KILLS:
                time.sleep(moments.uniform(0.0, 0.5))
                kills += process.exitcode is None
                process.kill()
            finished = exit_code_of(process) == 0
        assert_same_bits(folder, workplace / "whole")


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_next_start_goes_on(workplace: Path, signal_number: signal.Signals) -> None:
    folder = workplace / f"signalled-{signal_number.name}"
    process = start(folder)
    wait_for(process, folder, "checkpoints/checkpoint-*")
    assert process.pid is not None
    os.kill(process.pid, signal_number)
    # The run lets the exception out; `onward train` turns it into exit code 3 (tests/test_cli.py).
    assert exit_code_of(process) == 1
    assert not (folder / "model_trained.onnx").exists()
    assert exit_code_of(start(folder)) == 0
    assert_same_bits(folder, workplace / "whole")
