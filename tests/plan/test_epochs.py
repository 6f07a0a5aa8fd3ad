"""Epochs converted to steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from onward.errors import ParametersError
from onward.parameters import Parameters
from onward.plan.epochs import in_steps, is_in_epochs
from tests.mlp import parameters


def asked(folder: Path, last_batch: str = "wrap", **training: Any) -> Parameters:
    return parameters(folder, training={"num_train_steps": None, **training}, data={"last_batch": last_batch})


@pytest.mark.parametrize("last_batch", ["wrap", "drop", "short"])
@pytest.mark.parametrize(("epochs", "batch_size", "accumulation"), [(1, 4, 1), (3, 5, 1), (3, 5, 4), (0.5, 4, 1)])
@pytest.mark.parametrize("samples", [(23,), (24,), (12, 11), (100, 60, 7)])
def test_every_replica_reads_all_its_samples(
    tmp_path: Path, last_batch: str, epochs: float, batch_size: int, accumulation: int, samples: tuple[int, ...]
) -> None:
    run = asked(
        tmp_path, last_batch, num_epochs=epochs, batch_size=batch_size, gradient_accumulation_steps=accumulation
    )
    assert is_in_epochs(run)
    found, _ = in_steps(run, samples)
    batches = {
        "wrap": lambda count: count / batch_size,
        "drop": lambda count: count // batch_size,
        "short": lambda count: math.ceil(count / batch_size),
    }[last_batch]
    needed = max(1, math.ceil(max(epochs * batches(count) for count in samples)))
    assert found.training.steps == math.ceil(needed / accumulation) * accumulation
    assert not is_in_epochs(found)


def test_the_note_names_every_number(tmp_path: Path) -> None:
    run = asked(tmp_path, num_epochs=3, gradient_accumulation_steps=2, evaluation_period_epochs=1)
    found, note = in_steps(run, (12, 10))
    assert note == (
        "training.num_epochs: 3 epochs of 22 samples in batches of 4 on each of 2 replicas, 2 batches an update, take "
        "10 steps; evaluation every 1 epoch is every 4 steps."
    )
    assert (found.training.num_train_steps, found.training.evaluation_period) == (10, 4)
    _, note = in_steps(asked(tmp_path, num_epochs=1, batch_size=30), (12,))
    assert note == (
        "training.num_epochs: 1 epoch of 12 samples in batches of 30 take 1 step; training.batch_size is 30, above the "
        "12 samples of an epoch, so that a batch holds each of them several times."
    )


def test_exactly_one_of_steps_and_epochs(tmp_path: Path) -> None:
    words = r"^training\.num_train_steps, num_updates and num_epochs are missing; set one of them: how long to train"
    with pytest.raises(ParametersError, match=words):
        asked(tmp_path)
    words = r"^training\.num_updates is 3, and training\.num_epochs is 2; set one of them"
    with pytest.raises(ParametersError, match=words):
        asked(tmp_path, num_updates=3, num_epochs=2)
    words = r"^training\.num_train_steps is 8, and training\.num_epochs is 2; set one of them"
    with pytest.raises(ParametersError, match=words):
        asked(tmp_path, num_train_steps=8, num_epochs=2)
    words = r"^training\.evaluation_period is 2 and training\.evaluation_period_epochs is 1; set one of the two\.$"
    with pytest.raises(ParametersError, match=words):
        asked(tmp_path, num_epochs=2, evaluation_period=2, evaluation_period_epochs=1)


def test_what_does_not_fit_the_steps_is_refused(tmp_path: Path) -> None:
    run = parameters(
        tmp_path,
        training={"num_train_steps": None, "num_epochs": 1},
        learning_rate={"warmup_mode": "linear", "warmup_steps": 50},
    )
    with pytest.raises(ParametersError, match=r"^learning_rate\.warmup_steps is 50, more than .* which is 6;"):
        in_steps(run, (24,))
    with pytest.raises(ParametersError, match=r"^training\.num_epochs is 1\.0, and the number of samples is not known"):
        _ = run.training.steps
