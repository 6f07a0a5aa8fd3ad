"""The same run in other micro-batches: what is converted, what is left out, and what the search finds."""

from __future__ import annotations

from typing import Any

import pytest

from onward.errors import ParametersError
from onward.parameters import Parameters
from onward.plan.batch_size import largest_that_fits, micro_batch_sizes, with_micro_batches


def parameters_of(**sections: Any) -> Parameters:
    training = {"batch_size": 4, "num_train_steps": 48, "gradient_accumulation_steps": 6, "evaluation_period": 12}
    return Parameters.from_mapping(
        {
            "paths": {"model_path": "model.onnx", "output_dir": "out"},
            "loss": {"type": "output", "prediction": "loss"},
            "learning_rate": {"initial_lr": 0.1, "warmup_mode": "linear", "warmup_steps": 12},
            "profiler": {"first_step": 2, "last_step": 4},
            **sections,
            "training": {**training, **sections.get("training", {})},
        }
    )


def test_what_is_counted_in_steps_is_converted_and_what_is_learnt_stays() -> None:
    larger = with_micro_batches(parameters_of(), 12)
    training, rate, profiler = larger.training, larger.learning_rate, larger.profiler
    assert (training.batch_size, training.gradient_accumulation_steps, training.num_train_steps) == (12, 2, 16)
    assert (training.evaluation_period, rate.warmup_steps) == (4, 4)
    assert (profiler.first_step, profiler.last_step) == (1, 1)
    smaller = with_micro_batches(parameters_of(), 1)
    assert (smaller.training.gradient_accumulation_steps, smaller.training.num_train_steps) == (24, 192)
    assert (smaller.training.evaluation_period, smaller.learning_rate.warmup_steps) == (48, 48)
    assert with_micro_batches(smaller, 4) == parameters_of(), "there and back"


def test_replicas_that_share_the_samples_anew_make_as_many_updates() -> None:
    shared = with_micro_batches(parameters_of(), 3, 2)  # of 24 samples four replicas take 6 each
    training, rate = shared.training, shared.learning_rate
    assert (training.batch_size, training.gradient_accumulation_steps, training.num_train_steps) == (3, 2, 16)
    assert (training.evaluation_period, rate.warmup_steps) == (4, 4)


def test_a_share_of_the_steps_and_absent_fields_stay_as_they_are() -> None:
    rate = {"initial_lr": 0.1, "warmup_mode": "linear", "warmup_ratio": 0.25}
    larger = with_micro_batches(
        parameters_of(learning_rate=rate, profiler={}, training={"evaluation_period": 0}, next_rounds=[{}]), 24
    )
    assert (larger.learning_rate.warmup_ratio, larger.learning_rate.warmup_steps) == (0.25, None)
    assert (larger.training.evaluation_period, larger.profiler.first_step, len(larger.next_rounds)) == (0, None, 1)


def test_sizes_divide_the_samples_of_an_update() -> None:
    assert micro_batch_sizes(parameters_of()) == (1, 2, 3, 4, 6, 8, 12, 24)


def test_a_pipeline_keeps_enough_micro_batches() -> None:
    assert micro_batch_sizes(parameters_of(distributed={"pipeline_parallel_size": 3})) == (1, 2, 3, 4, 6, 8)
    by_turns = {"pipeline_parallel_size": 2, "pipeline_schedule": "Interleaved1F1B"}
    assert micro_batch_sizes(parameters_of(distributed=by_turns)) == (1, 2, 3, 4, 6, 12), "24 / 8 = 3 is odd"


def test_the_largest_that_fits_is_found_with_few_questions() -> None:
    asked: list[int] = []

    def fits(size: int, limit: int) -> bool:
        asked.append(size)
        return size <= limit

    sizes = tuple(range(1, 1001))
    for limit in (1, 2, 499, 500, 501, 999, 1000, 5000):
        asked.clear()
        assert largest_that_fits(sizes, lambda size, limit=limit: fits(size, limit)) == min(limit, 1000)
        assert len(asked) <= 10
    assert largest_that_fits(sizes, lambda _: False) is None


def test_a_pipeline_of_several_rounds_is_refused() -> None:
    with pytest.raises(ParametersError, match="whose number of micro-batches cannot change from round to round"):
        parameters_of(training={"find_batch_size": True}, distributed={"pipeline_parallel_size": 2}, next_rounds=[{}])
