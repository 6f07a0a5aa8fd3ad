"""What local SGD needs of the other fields, and what it excludes: each problem in a sentence of its own."""

from __future__ import annotations

from typing import Any

import pytest

from onward.parameters import Parameters
from onward.parameters.changes import notes_on_changes
from onward.parameters.distributed import Distributed
from onward.parameters.local_sgd import local_sgd_problems
from tests.parameters.test_checks import make, refusal

LOCAL = {"sync_every_updates": 50}
TWO = {**LOCAL, "data_parallel_size": 2}
FOUR = {**LOCAL, "data_parallel_size": 4}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            LOCAL,
            "a worker is 1 of 1 replicas (data_parallel_size 1 * context_parallel_size 1), which does not make two",
        ),
        ({**TWO, "context_parallel_size": 2, "replicas_per_worker": 4}, "a worker is 4 of 4 replicas (data_parallel"),
        ({**FOUR, "replicas_per_worker": 3}, "a worker is 3 of 4 replicas (data_parallel_size 4 * context_parallel_s"),
        (
            {**LOCAL, "layout": "auto"},
            "which changes what is trained, and distributed.layout is auto, which chooses am",
        ),
        (
            {**TWO, "zero_stage": 2},
            "zero_stage is 2, which shards over all 2 replicas: a worker of its own has no part",
        ),
        ({**FOUR, "zero_stage": 1, "replicas_per_worker": 1}, "zero_stage is 1, but a worker is 1 replica, which has"),
        (
            {**FOUR, "context_parallel_size": 2, "replicas_per_worker": 1},
            "a worker is 1 replicas, which context_parallel_size 2 does not divide; what these share, one worker",
        ),
        ({**FOUR, "expert_parallel_size": 2, "replicas_per_worker": 1}, "which expert_parallel_size 2 does not divide"),
        (
            {**FOUR, "data_parallel_size": 8, "zero_stage": 3, "zero_group_size": 4, "replicas_per_worker": 2},
            "which zero_group_size 4 does not divide; what these share, one worker holds. Set replicas_per_worker to a",
        ),
        ({**TWO, "enable_adasum": True}, "enable_adasum is true, and workers combine differences of weights, not grad"),
        ({**TWO, "outer_momentum": 0.0}, "outer_momentum is 0, but outer_optimizer is nesterov, which needs momentum."),
    ],
)
def test_sizes_and_what_belongs_to_them(fields: dict[str, Any], words: str) -> None:
    assert words in refusal(distributed=fields)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"averaging": {"kind": "ema"}}, "averaging.kind is ema, and between two synchronizations every worker would"),
        (
            {"pruning": {"pattern": "2:4"}},
            "pruning.pattern is 2:4, and every worker would choose other elements. Leave",
        ),
        (
            {"optimizer": {"training_optimizer_name": "AdamWScheduleFree"}},
            "the optimizer AdamWScheduleFree evaluates an average of its own, other weights on every worker. Leave one",
        ),
        (
            {"machine": {"check_computation_period": 5}},
            "machine.check_computation_period compares replicas, whose weights are then different. Leave one of the",
        ),
        (
            {"distributed": {**TWO, "elastic": True}, "checkpoint": {"checkpoints_dir": "c"}},
            "distributed.elastic is true, whose updates are the same with any number of replicas. Leave one of the two",
        ),
    ],
)
def test_what_it_excludes(sections: dict[str, dict[str, Any]], words: str) -> None:
    message = refusal(**{"distributed": TWO, **sections})
    assert "distributed.sync_every_updates is 50, but " in message
    assert words in message


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"early_stopping": {"patience": 3}},
            "training.evaluation_period is 40 steps, but early_stopping.patience is 3, and the weights to compare "
            "change only every 50 updates (distributed.sync_every_updates). Set evaluation_period to 50 or more, or "
            "sync_every_updates to 40 or less.",
        ),
        (
            {
                "checkpoint": {"checkpoints_dir": "c", "keep_best": True},
                "training": {"evaluation_period": 96, "gradient_accumulation_steps": 2},
            },
            "training.evaluation_period is 96 steps, but checkpoint.keep_best is true, and the weights to compare "
            "change only every 50 updates of 2 steps each (training.gradient_accumulation_steps) "
            "(distributed.sync_every_updates). Set evaluation_period to 100 or more, or sync_every_updates to 48 or",
        ),
    ],
)
def test_evaluations_are_not_compared_more_often_than_weights_change(
    sections: dict[str, dict[str, Any]], words: str
) -> None:
    training = {"evaluation_period": 40, "num_train_steps": 1000, **sections.get("training", {})}
    assert words in refusal(**{"distributed": TWO, **sections, "training": training})
    # As often as they change, and without a comparison, it is allowed.
    often = {**training, "evaluation_period": 100}
    assert local_sgd_problems(make(**{"distributed": TWO, **sections, "training": often})) == []
    assert local_sgd_problems(make(distributed=TWO, training=training)) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("outer_lr", 0.5), ("outer_optimizer", "sgd"), ("outer_momentum", 0.5), ("replicas_per_worker", 2)],
)
def test_its_fields_are_refused_without_it(name: str, value: Any) -> None:
    """`onward plan` prints no notes on fields without effect, and gradients would be reduced at every update."""
    assert (
        f"distributed.{name} is {value}, but it has an effect only with distributed.sync_every_updates. Change that, "
        f"or remove distributed.{name}."
    ) in refusal(distributed={"data_parallel_size": 4, name: value})
    make(distributed={**FOUR, name: value})


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({}, None),
        ({"replicas_per_worker": 4}, None),
        (TWO, 1),
        ({**FOUR, "replicas_per_worker": 2}, 2),
        ({**FOUR, "zero_stage": 3, "zero_group_size": 2}, 2),
        ({**FOUR, "context_parallel_size": 2}, 2),
        ({**FOUR, "expert_parallel_size": 2}, 2),
    ],
)
def test_the_size_of_a_worker(fields: dict[str, Any], size: int | None) -> None:
    distributed = Distributed(**fields)
    assert distributed.worker_size == size
    if size is not None:
        assert local_sgd_problems(make(distributed=fields)) == []


@pytest.mark.parametrize(
    ("fields", "tensors"),
    [
        ({}, 0), (TWO, 2), ({**TWO, "outer_optimizer": "sgd"}, 1),
        ({**TWO, "outer_optimizer": "sgd", "outer_momentum": 0.5}, 2),
    ],
)  # fmt: skip
def test_what_is_kept_for_each_weight(fields: dict[str, Any], tensors: int) -> None:
    assert Distributed(**fields).outer_tensors == tensors


def test_a_run_that_resumes_with_other_fields_is_told() -> None:
    """Unlike the rest of `distributed`, they change what is computed."""
    before: Parameters = make(distributed=TWO)
    now = make(distributed={**TWO, "sync_every_updates": 5, "slow_rank_period": 7})
    (note,) = notes_on_changes([now], {"parameters": before.to_mapping()}, 3)
    assert "distributed.sync_every_updates was 50, is now 5. They hold from here on" in note
    assert "slow_rank_period" not in note
