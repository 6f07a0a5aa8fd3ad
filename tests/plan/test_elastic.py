"""Elastic runs: with any number of replicas an update has as many samples, or the run is refused."""

from __future__ import annotations

from typing import Any

import pytest

from onward.errors import ParametersError
from onward.parameters import Parameters
from onward.plan.elastic import fit_to_ranks
from onward.plan.epochs import in_steps, updates_in_steps
from tests.plan.test_batch_size import parameters_of

ELASTIC = {"data_parallel_size": 4, "elastic": True}  # 4 replicas * 4 samples * 6 micro-batches: 96 samples an update


def elastic(**sections: Any) -> Parameters:
    distributed = {**ELASTIC, **sections.pop("distributed", {})}
    return parameters_of(checkpoint={"checkpoints_dir": "out/checkpoints"}, distributed=distributed, **sections)


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96])
def test_an_update_keeps_its_samples_and_a_round_its_updates(replicas: int) -> None:
    asked = elastic(next_rounds=[{"training": {"num_train_steps": 12}}])
    fitted, notes = fit_to_ranks(asked, replicas)
    for before, after in zip((asked, *asked.next_rounds), (fitted, *fitted.next_rounds), strict=True):
        training = after.training
        assert after.distributed.data_parallel_size == replicas
        assert replicas * training.batch_size * training.gradient_accumulation_steps == 96
        assert training.batch_size <= before.training.batch_size
        assert training.steps * before.training.gradient_accumulation_steps == (
            before.training.steps * training.gradient_accumulation_steps
        )
    assert notes == [
        f"distributed.elastic: {replicas} replica{'s' if replicas > 1 else ''} with micro-batches of "
        f"{fitted.training.batch_size} samples, {fitted.training.gradient_accumulation_steps} an update, which has 96 "
        "samples as with any number of replicas. Possible numbers: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96."
    ]


def test_as_many_replicas_as_asked_for_change_nothing() -> None:
    assert fit_to_ranks(elastic(), 4)[0] == elastic()
    assert fit_to_ranks(parameters_of(), 7) == (parameters_of(), [])


@pytest.mark.parametrize(
    ("distributed", "ranks", "words"),
    [
        (
            {}, 5,
            "distributed.elastic: an update has 96 samples (data_parallel_size 4 * batch_size 4 * "
            "gradient_accumulation_steps 6), which 5 replicas cannot share equally. Start 1, 2, 3, 4, 6, 8, 12, 16, "
            "24, 32, 48, 96 replicas, or choose a number of samples that all numbers of replicas divide that "
            "can occur.",
        ),
        (
            {"horizontal_parallel_size": 2}, 5,
            "distributed.elastic: 5 processes were started, but a replica is 2 processes (data_parallel_size 1 * "
            "horizontal_parallel_size 2 * pipeline_parallel_size 1). Start a multiple of 2.",
        ),
        ({"context_parallel_size": 2}, 1, "but a replica is 2 processes (data_parallel_size 1"),
        ({"pipeline_parallel_size": 4}, 2, "but a replica is 4 processes"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused(distributed: dict[str, int], ranks: int, words: str) -> None:
    with pytest.raises(ParametersError) as caught:
        fit_to_ranks(elastic(distributed=distributed), ranks)
    assert words in str(caught.value)


def test_a_pipeline_keeps_enough_micro_batches() -> None:
    """4 samples of a replica: one micro-batch of 4 would be fewer than the stages, two of 2 are enough."""
    asked = elastic(distributed={"pipeline_parallel_size": 2, "pipeline_schedule": "1F1B"})
    training = fit_to_ranks(asked, 2 * 24)[0].training
    assert (training.batch_size, training.gradient_accumulation_steps) == (2, 2)
    with pytest.raises(ParametersError, match="needs at least 2 micro-batches"):
        fit_to_ranks(asked, 2 * 96)


def test_epochs_are_as_many_updates_with_any_number_of_replicas() -> None:
    asked = elastic(training={"num_train_steps": None, "num_epochs": 3, "evaluation_period": 0})
    updates = set()
    for samples in ([1000], [520, 480], [400, 400, 200], [300, 250, 250, 200]):
        fitted, _ = in_steps(fit_to_ranks(asked, len(samples))[0], samples)
        updates.add(fitted.training.steps // fitted.training.gradient_accumulation_steps)
    assert updates == {32}  # 3,000 samples, 96 an update


def test_a_round_in_updates_has_as_many_from_where_it_resumes() -> None:
    """After 10 updates of 6 micro-batches, whose steps are counted anew when they are loaded."""
    asked = elastic(training={"num_train_steps": None, "num_updates": 40})
    training = updates_in_steps(fit_to_ranks(asked, 8)[0], (60, 10)).training
    assert (training.gradient_accumulation_steps, training.steps) == (3, 120)
