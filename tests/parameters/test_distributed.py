"""What must hold between the fields of `distributed`, each problem in a sentence of its own."""

from __future__ import annotations

from typing import Any

import pytest

from onward.parameters.distributed import Distributed, distribution_problems, stages_of_a_rank

PIPELINE = {"pipeline_parallel_size": 4}


@pytest.mark.parametrize(
    ("fields", "micro_batches", "words"),
    [
        ({"enable_adasum": True, "zero_stage": 1}, 1, "enable_adasum is true and zero_stage is 1; Adasum needs every"),
        ({"layout": "auto", "zero_stage": 1}, 1, "layout is auto, which chooses zero_stage. Leave that out, or"),
        ({"zero_offload_to_cpu": True}, 1, "zero_stage is 0; set a stage from 1 to 3."),
        ({"zero_group_size": 2, "data_parallel_size": 2}, 1, "zero_group_size is 2, but zero_stage is 0; set a stage"),
        (
            {"zero_group_size": 4, "data_parallel_size": 3, "context_parallel_size": 2, "zero_stage": 1}, 1,
            "zero_group_size is 4, but there are 6 replicas (data_parallel_size 3 * context_parallel_size 2), which",
        ),
        ({"zero_group_size": 1, "data_parallel_size": 2, "zero_stage": 1}, 1, "Set a divisor of that above 1."),
        ({"sum_in_fp32": True}, 1, "sum_in_fp32 is true, but gradients travel in fp32. Set reduction_type to bf16 or"),
        ({"sequence_parallel": True}, 1, "sequence_parallel is true, but horizontal_parallel_size is 1"),
        ({"allow_whole_layers": True}, 1, "allow_whole_layers is true, but horizontal_parallel_size is 1, which"),
        ({"op_id_to_stage": {"a": 1}}, 1, "op_id_to_stage is given, but pipeline_parallel_size is 1; there is nothing"),
        (
            {**PIPELINE, "op_id_to_stage": {"a": 1}, "pipeline_partition_cut_list": "x"}, 4,
            "pipeline_partition_cut_list and op_id_to_stage are given, but the stages can be cut in one way only.",
        ),
        ({"stage_memory_gb": 2.0}, 1, "stage_memory_gb is 2, which bounds stages that are balanced, but pipeline_para"),
        ({**PIPELINE, "stages_per_rank": 2}, 4, "stages_per_rank is 2, but 1F1B has 1; leave it out, or use"),
        (PIPELINE, 3, "needs at least 4 micro-batches for an update; training.gradient_accumulation_steps is 3."),
        (
            {**PIPELINE, "pipeline_schedule": "Interleaved1F1B"}, 6,
            "groups of the pipeline's size, 4; training.gradient_accumulation_steps, the micro-batches of an",
        ),
    ],
)  # fmt: skip
def test_one_problem_each(fields: dict[str, Any], micro_batches: int, words: str) -> None:
    (problem,) = distribution_problems(Distributed(**fields), micro_batches)
    assert words in problem
    assert problem.startswith("distributed")


@pytest.mark.parametrize(
    ("fields", "micro_batches"),
    [({}, 1), (PIPELINE, 4), ({**PIPELINE, "pipeline_schedule": "GPipe"}, 1), ({**PIPELINE, "stages_per_rank": 1}, 4)],
)
def test_no_problem(fields: dict[str, Any], micro_batches: int) -> None:
    assert distribution_problems(Distributed(**fields), micro_batches) == []


@pytest.mark.parametrize(
    ("schedule", "asked", "count"),
    [("1F1B", None, 1), ("Interleaved1F1B", None, 2), ("Interleaved1F1B", 3, 3), ("ZBVZeroBubble", None, 2)],
)
def test_stages_of_a_rank(schedule: str, asked: int | None, count: int) -> None:
    assert stages_of_a_rank(Distributed(pipeline_schedule=schedule, stages_per_rank=asked)) == count
