"""A stage of a pipeline may hold frozen weights only: the run follows one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.invariants.cases import CASES
from tests.invariants.layouts import Layout, assert_follows, knowing_gradients, tensor_difference, train

FIRST, LAST = ("fc0.*", "fc1.*"), ("fc2.*", "fc3.*")
LAMB = {"training_optimizer_name": "Lamb", "max_norm_clip": 0.5, "optimizer_attributes": []}
FP16 = {"use_mixed_precision": True, "use_bfloat16": False, "loss_scale": 1024.0}


def two_stages(data: int = 1, **distributed: Any) -> Layout:
    return Layout(data=data, pipeline=2, distributed={"pipeline_partition_cut_list": "relu1", **distributed})


def four_stages(schedule: str) -> Layout:
    cuts = {"pipeline_partition_cut_list": "relu0,relu1,relu2", "pipeline_schedule": schedule}
    return Layout(pipeline=2, distributed=cuts)


@pytest.mark.parametrize(
    ("layout", "frozen", "sections"),
    [
        pytest.param(two_stages(), FIRST, {"optimizer": LAMB}, marks=knowing_gradients),
        (two_stages(), LAST, {"mixed_precision": FP16}),
        pytest.param(
            two_stages(pipeline_schedule="GPipe"),
            FIRST,
            {"mixed_precision": FP16, "recompute": {"segments": True}},
            marks=knowing_gradients,
        ),
        pytest.param(four_stages("Interleaved1F1B"), ("fc0.*", "fc2.*"), {}, marks=knowing_gradients),
        pytest.param(four_stages("ZBVZeroBubble"), ("fc1.*", "fc3.*"), {}, marks=knowing_gradients),
        pytest.param(two_stages(2), FIRST, {}, marks=[pytest.mark.slow, knowing_gradients]),
        pytest.param(two_stages(2, zero_stage=3), LAST, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_frozen_stages_follow_one_process(layout: Layout, frozen: Sequence[str], sections: dict[str, Any]) -> None:
    sections = {**sections, "training": {"weights_not_to_train": list(frozen)}}
    alone = train(CASES["mlp"], Layout(), sections=sections, accumulation=4, test_samples=6)
    found = train(CASES["mlp"], layout, sections=sections, accumulation=4, test_samples=6)
    bound = 1e-3 if "mixed_precision" in sections else 1e-6
    assert_follows(found, alone, of_losses=bound, of_weights=bound)
    assert found.metrics[-1]["loss"] == pytest.approx(alone.metrics[-1]["loss"], rel=bound)


@knowing_gradients
def test_weights_are_checked_where_a_stage_has_none_that_train() -> None:
    sections = {"training": {"weights_not_to_train": list(FIRST)}, "machine": {"check_weights_period": 1}}
    alone = train(CASES["mlp"], Layout(), sections=sections, accumulation=4)
    found = train(CASES["mlp"], two_stages(), sections=sections, accumulation=4)
    assert_follows(found, alone, of_losses=1e-6, of_weights=1e-6)


def test_a_checkpoint_of_frozen_stages_goes_on_in_one_process(tmp_path: Path) -> None:
    sections = {"training": {"weights_not_to_train": list(FIRST)}}
    saved = {"checkpoint": {"checkpoints_dir": str(tmp_path), "checkpoint_period": 3}}
    alone = train(CASES["mlp"], Layout(), sections=sections, accumulation=4)
    train(CASES["mlp"], two_stages(), sections={**sections, **saved}, accumulation=4, updates=3, updates_of_data=6)
    resumed = train(CASES["mlp"], Layout(), sections={**sections, **saved}, accumulation=4)
    assert len(resumed.losses) == 3
    assert tensor_difference(resumed, alone, ("weights/",)) < 1e-6
