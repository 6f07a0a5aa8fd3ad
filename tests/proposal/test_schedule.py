"""How much at a time, how long and at which rate: by the model and the number of samples, down to one."""

from __future__ import annotations

from typing import Any

import pytest

from onward.proposal.model_facts import BatchProof, Port
from onward.proposal.proposal import Answers, Choice, Counts
from onward.proposal.schedule import (
    accumulation,
    batch_size,
    optimizer_choices,
    training_choices,
    updates_an_epoch,
)
from onward.proposal.task import Task
from tests.proposal.facts import model, port

TASK = Task(kind="classification", text="", prediction="y", loss=())
NET = model((port("x", 4),), (port("y", 3),))
FIXED = model((Port("x", "float32", (4, 3)),), ())


def values(choices: list[Choice]) -> dict[str, Any]:
    return {choice.field.partition(".")[2]: choice.value for choice in choices}


@pytest.mark.parametrize(("samples", "size"), [(0, 64), (1, 1), (8, 1), (100, 8), (511, 32), (512, 64), (10**9, 64)])
def test_few_samples_make_small_batches(samples: int, size: int) -> None:
    assert batch_size(NET, TASK, Counts(samples, 0), Answers()).value == size


def test_batches_that_are_asked_for_or_fixed() -> None:
    assert batch_size(NET, TASK, Counts(10, 0), Answers(batch_size=7)).value == 7
    assert batch_size(FIXED, TASK, Counts(1000, 0), Answers(batch_size=7)).value == 4
    (choice,) = accumulation(FIXED, TASK, Counts(1000, 0), Answers())
    assert (choice.value, choice.reason) == (
        16,
        "16 batches of 4 make one update: 64 samples; num_updates counts these.",
    )
    assert accumulation(FIXED, TASK, Counts(20, 0), Answers()) == []
    assert accumulation(NET, TASK, Counts(1000, 0), Answers()) == []


def test_a_batch_that_the_file_does_not_have_is_explained() -> None:
    proven = model((Port("x", "float32", (1, 3)),), (), batch_proof=BatchProof(1e-7))
    reason = batch_size(proven, TASK, Counts(1000, 0), Answers()).reason
    assert "The file fixes a batch size of 1: training rewrites the graph for any size" in reason
    refused = model((Port("x", "float32", (1, 3)),), (), batch_proof=BatchProof(None, "it mixes samples"))
    found = batch_size(refused, TASK, Counts(1000, 0), Answers())
    assert found.value == 1
    assert found.reason.endswith("cannot be rewritten for another, because it mixes samples.")


@pytest.mark.parametrize(("samples", "updates"), [(0, 100), (1, 1), (8, 1), (9, 2)])
def test_updates_of_an_epoch(samples: int, updates: int) -> None:
    assert updates_an_epoch(Counts(samples, 0), 8) == updates


@pytest.mark.parametrize(
    ("samples", "is_trained", "epochs"), [(8, True, 10), (8, False, 40), (8 * 100, True, 3), (8 * 10**6, False, 1)]
)
def test_epochs(samples: int, is_trained: bool, epochs: int) -> None:
    net = model((port("x", 4),), (), is_trained)
    training, rate = training_choices(net, TASK, Counts(samples, 0), Answers(), 8)
    found = values(training)
    assert found["num_epochs"] == epochs
    assert 1 <= found["display_loss_steps"] <= 100
    assert values(rate)["initial_lr"] == (3e-4 if is_trained else 3e-3)
    assert "evaluation_period_epochs" not in found


def test_what_is_asked_for_wins() -> None:
    training, rate = training_choices(NET, TASK, Counts(800, 80), Answers(epochs=60, learning_rate=0.5), 8)
    assert values(training)["num_epochs"] == 60
    assert values(training)["evaluation_period_epochs"] == 3
    assert values(rate)["initial_lr"] == 0.5


def test_statistics_are_kept_where_batches_are_small() -> None:
    net = model((port("x", 4),), (), frozen={"m": "a running statistic"})
    assert values(training_choices(net, TASK, Counts(80, 0), Answers(), 8)[0])["freeze_batch_norm"] is True
    assert "freeze_batch_norm" not in values(training_choices(net, TASK, Counts(80, 0), Answers(), 16)[0])


def test_decay_is_of_matrices() -> None:
    weights = {"a.weight": (2, 2), "a.bias": (2,), "norm.g": (2,), "odd": ()}
    rules = values(optimizer_choices(model((), (), weights=weights)))["optimizer_attributes"]
    assert rules == [{"weights": "*", "lambda": 0.01}, {"weights": ["*bias*", "*norm*", "odd"], "lambda": 0.0}]
    named_alike = {"bias_matrix": (2, 2), "a.bias": (2,)}
    rules = values(optimizer_choices(model((), (), weights=named_alike)))["optimizer_attributes"]
    assert rules[1]["weights"] == ["a.bias"]
    assert "max_norm_clip" in values(optimizer_choices(model((), (), operators={"LSTM": 1})))
