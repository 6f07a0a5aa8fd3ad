"""Pipelines of replicas, 2 stages (or 4) by 2: gradients are the mean over the replicas, wrapped as DDP or sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from onward.errors import ParametersError
from onward.parallel.launch.process import Mesh
from onward.parallel.pipeline.pipeline import check_torch, check_wrapping
from onward.parameters.distributed import PipelineSchedule
from onward.plan.pipeline.schedules import SPLITS_BACKWARD
from onward.plan.pipeline.stages import StagePlan
from tests.invariants.rank_pool import end_ranks
from tests.invariants.test_layouts import follows, layout
from tests.parallel.pipelines import (
    STAGES_PER_RANK,
    Outcome,
    batches,
    by_every_schedule,
    difference,
    in_one_process,
    mesh_of,
)
from tests.ranks import run_on_ranks

WHOLE_BACKWARD: list[PipelineSchedule] = [name for name in STAGES_PER_RANK if name not in SPLITS_BACKWARD]


def by_ddp(module: nn.Module, mesh: Mesh) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh.data)


def by_fully_shard(module: nn.Module, mesh: Mesh) -> nn.Module:
    assert mesh.device_mesh is not None
    return fully_shard(module, mesh=mesh.device_mesh["data"])


WRAPPINGS = {"ddp": by_ddp, "fully_shard": by_fully_shard}


def on_rank(
    wrapping: str,
    name: str,
    data: Sequence[Sequence[Mapping[str, torch.Tensor]]],
    schedules: Sequence[PipelineSchedule],
) -> tuple[int, list[Outcome]]:
    place = mesh_of(2, 2).place.data
    factors = torch.full((4,), 0.25)
    return place, by_every_schedule(name, data[place], factors, (), 2, WRAPPINGS[wrapping], schedules)


@pytest.mark.slow
@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("name", ["gpt2", "u_net"])
def test_replicas_of_a_pipeline_share_the_mean_gradient(name: str, wrapping: str) -> None:
    data = [batches(name, 4, seed=10), batches(name, 4, seed=20)]
    alone = [in_one_process(name, one, torch.full((4,), 0.25)) for one in data]
    schedules = WHOLE_BACKWARD if wrapping == "ddp" else list(STAGES_PER_RANK)
    ranks = run_on_ranks(4, on_rank, wrapping, name, data, schedules)
    for index, schedule in enumerate(schedules):
        seen = set()
        for place, outcomes in ranks:
            assert difference(outcomes[index].losses, alone[place].losses) < 1e-5
            for weight, gradient in outcomes[index].gradients.items():
                mean = (alone[0].gradients[weight] + alone[1].gradients[weight]) / 2
                assert difference(gradient, mean) < 1e-5, (schedule, weight)
                seen.add(weight)
        assert seen == set(alone[0].gradients)


def test_an_older_torch_is_refused_where_it_would_mix_up_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(*with_gradient: bool) -> StagePlan:
        received = [SimpleNamespace(name=f"value{i}", with_gradient=one) for i, one in enumerate(with_gradient)]
        return cast(StagePlan, SimpleNamespace(stages=[SimpleNamespace(received=received)]))

    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    check_torch("Interleaved1F1B", plan(True))
    with pytest.raises(ParametersError) as caught:
        check_torch("ZBVZeroBubble", plan(True))
    assert str(caught.value) == (
        "distributed.pipeline_schedule ZBVZeroBubble splits backward passes, and torch 2.11.0+cu130 does so only where "
        "every value that is sent has a gradient. Use Interleaved1F1B, or torch 2.13 or newer."
    )
    with pytest.raises(ParametersError) as caught:
        check_torch("1F1B", plan(True, False))
    assert str(caught.value) == (
        "torch 2.11.0+cu130 sends only values with a gradient from stage to stage; value1 would be sent without. Cut "
        "elsewhere (distributed.pipeline_partition_cut_list), or use torch 2.13 or newer."
    )
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    check_torch("ZBVZeroBubble", plan(True, False))


def test_ddp_is_refused_where_it_would_miss_gradients() -> None:
    class Wrapped(DistributedDataParallel):
        def __init__(self) -> None:
            nn.Module.__init__(self)

    for schedule in SPLITS_BACKWARD:
        with pytest.raises(ParametersError, match=r"does not see. Use Interleaved1F1B, or set zero_stage"):
            check_wrapping(schedule, [Wrapped()])  # type: ignore[arg-type]
    check_wrapping("1F1B", [Wrapped()])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", sorted(SPLITS_BACKWARD))
def test_zero_3_by_segments_loses_no_gradient_under_zero_bubble_schedules(schedule: str) -> None:
    """ZeRO 3 puts segments away after their forward pass; `by_fully_shard` above has none."""
    try:
        follows("deep_gpt2", layout(2, 1, 2, pipeline_schedule=schedule, zero_stage=3), 4)
    finally:
        end_ranks()
