"""What fields of `speed` do not go with."""

from __future__ import annotations

from typing import Any

import pytest

from onward.errors import ParametersError
from onward.parameters import Parameters
from tests.mlp import CROSS_ENTROPY


def make(**changes: Any) -> Parameters:
    """A run that updates inside the backward pass."""
    return Parameters.from_mapping(
        {
            "paths": {"model_path": "model.onnx"},
            "loss": dict(CROSS_ENTROPY),
            "learning_rate": {"initial_lr": 0.1},
            **changes,
            "training": {"batch_size": 4, "num_train_steps": 12, **changes.get("training", {})},
            "speed": {"update_in_backward": True, **changes.get("speed", {})},
        }
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"optimizer": {"max_norm_clip": 1.5}},
            "optimizer.max_norm_clip is 1.5, and the norm of all gradients is known only when the weights are updated; "
            "remove max_norm_clip",
        ),
        (
            {"training": {"gradient_accumulation_steps": 3}},
            "training.gradient_accumulation_steps is 3, whose gradients would have to be kept; set it to 1",
        ),
        (
            {"training": {"find_batch_size": True}},
            "training.find_batch_size is true, which may accumulate gradients; set batch_size",
        ),
        (
            {"training": {"halve_batch_on_out_of_memory": True}, "checkpoint": {"checkpoints_dir": "saved"}},
            "training.halve_batch_on_out_of_memory is true, which may accumulate gradients; set batch_size",
        ),
        (
            {"mixed_precision": {"use_mixed_precision": True}},
            "mixed_precision is fp16, whose loss scale is known to be too large only when weights are updated; set "
            "use_bfloat16",
        ),
        *(
            (
                {"distributed": sizes},
                "the sizes of distributed make 2 processes, and gradients are reduced over processes when all are "
                "there; train with one",
            )
            for sizes in (
                {"data_parallel_size": 2},
                {"data_parallel_size": 2, "zero_stage": 2},
                {"horizontal_parallel_size": 2},
                {"pipeline_parallel_size": 2, "pipeline_schedule": "GPipe"},
                {"context_parallel_size": 2},
                {"data_parallel_size": 2, "sync_every_updates": 2},
            )
        ),
        (
            {"distributed": "auto"},
            "distributed.layout is auto, and gradients are reduced over processes when all are there; train with one",
        ),
        (
            {"distributed": {"elastic": True}, "checkpoint": {"checkpoints_dir": "saved"}},
            "distributed.elastic is true, and gradients are reduced over processes when all are there; train with one",
        ),
        (
            {"speed": {"cuda_graphs": True}},
            "speed.cuda_graphs is true, and recorded passes hold no updates; remove cuda_graphs",
        ),
    ],
)
def test_what_updates_inside_the_backward_pass_do_not_go_with(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ParametersError) as caught:
        make(**changes)
    assert str(caught.value) == f"speed.update_in_backward is true, but {reason}, or remove update_in_backward."


def test_what_they_go_with() -> None:
    bf16 = {"use_mixed_precision": True, "use_bfloat16": True}
    assert make(mixed_precision=bf16).speed.update_in_backward
    assert make(mixed_precision={"use_mixed_precision": "auto"}).speed.update_in_backward
