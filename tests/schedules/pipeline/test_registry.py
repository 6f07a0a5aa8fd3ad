"""A pipeline schedule is one file and one line: here one that onward does not have is planned, checked and drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from onward.errors import ParametersError
from onward.parameters import Distributed
from onward.parameters.distributed import stages_of_a_rank
from onward.plan.costs.stage_cost import StageCost
from onward.plan.pipeline.schedules import draw, order_of, simulate
from onward.schedules.pipeline import registry
from onward.schedules.pipeline.actions import Action
from onward.schedules.pipeline.kind import PipelineKind
from tests.mlp import parameters


def _order(rank: int, size: int, micro_batches: int, stage_count: int) -> tuple[Action, ...]:
    """A micro-batch goes there and back before the next one starts."""
    return tuple(Action(kind, rank, m) for m in range(micro_batches) for kind in ("forward", "backward"))


ONE_BY_ONE = PipelineKind(name="OneByOne", torch_class="ScheduleGPipe", order=_order, takes_groups=True)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "PIPELINES", (*registry.PIPELINES, ONE_BY_ONE))


def test_a_new_schedule_is_planned_and_drawn() -> None:
    assert stages_of_a_rank(Distributed(pipeline_parallel_size=2, pipeline_schedule="OneByOne")) == 1
    assert order_of("OneByOne", 2, 2)[1][:2] == (Action("forward", 1, 0), Action("backward", 1, 0))
    timeline = simulate("OneByOne", 2, 2, [StageCost(1, 0.5, 0.5)] * 2)
    assert timeline.bubble_share == pytest.approx(0.5)
    assert draw(timeline, width=8).splitlines()[:2] == ["rank  0 |0..a1..b|", "rank  1 |.0a..1b.|"]


def test_its_numbers_are_checked(tmp_path: Path) -> None:
    split = {"pipeline_parallel_size": 2, "pipeline_schedule": "OneByOne"}
    training = {"gradient_accumulation_steps": 3, "num_train_steps": 9}
    with pytest.raises(ParametersError, match="pipeline_schedule is OneByOne, whose micro-batches come in groups"):
        parameters(tmp_path, distributed=split, training=training)
    with pytest.raises(ParametersError, match="'ZBVZeroBubble' or 'OneByOne'"):
        parameters(tmp_path, distributed={"pipeline_schedule": "TwoByTwo"})
