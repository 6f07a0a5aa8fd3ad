"""A slow rank is named with its lag, whatever the collectives of the layout hide; a machine that is busy is not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from onward.data.in_memory import InMemoryDataLoader
from onward.engine.faults.slow_ranks import Lag, SlowRankDetector
from onward.environment import Environment
from onward.parameters import Parameters
from onward.plan.topology import Topology
from onward.runner import TrainingRunner
from tests.invariants import exchanges
from tests.invariants.layouts import Layout, rows_of_replica
from tests.invariants.rank_pool import call_on_ranks, end_ranks
from tests.watching import Recorder

SLEEP = 0.4
"""Seconds: more than four times what a rank computes in an update on a busy machine (40 ms, with ZeRO 3)."""


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    yield
    end_ranks()


def compared(detector: SlowRankDetector, *own: float) -> tuple[list[int], list[int]]:
    slow, recovered = detector.compare([(one, 0.0) for one in own])
    return [lag.rank for lag in slow], recovered


def test_a_rank_is_named_when_two_comparisons_in_a_row_find_it_slow() -> None:
    detector = SlowRankDetector(topology=Topology(data_size=4), ratio=1.5)
    assert compared(detector, 1.0, 1.1, 1.6, 0.9) == ([], [])
    assert compared(detector, 1.0, 1.1, 1.2, 0.9) == ([], [])
    assert compared(detector, 1.0, 1.1, 1.6, 0.9) == ([], [])
    assert compared(detector, 1.0, 1.1, 1.8, 0.9) == ([2], [])
    assert compared(detector, 1.0, 1.1, 1.8, 0.9) == ([], [])  # once
    assert compared(detector, 1.0, 1.1, 1.2, 0.9) == ([], [2])
    assert compared(detector, 2.0, 2.1, 2.2, 1.9) == ([], [])  # all of them


def test_lags_of_milliseconds_are_not_worth_a_message() -> None:
    detector = SlowRankDetector(topology=Topology(data_size=2), ratio=1.5)
    assert [compared(detector, 0.001, 0.009) for _ in range(3)] == [([], [])] * 3


def test_stages_of_a_pipeline_differ_and_only_their_own_past_says_that_they_are_slow() -> None:
    detector = SlowRankDetector(topology=Topology(pipeline_size=2), ratio=1.5)
    assert [compared(detector, 1.0, 3.0) for _ in range(3)] == [([], [])] * 3
    assert compared(detector, 2.0, 6.0) == ([], [])  # longer samples: all of them
    assert compared(detector, 1.0, 5.0) == ([], [])
    assert compared(detector, 1.0, 5.0) == ([1], [])


def test_words_name_rank_process_update_and_lag() -> None:
    lag = Lag(rank=3, own_seconds=0.84, expected_seconds=0.41, data_seconds=0.0, has_peers=True)
    assert lag.words("node7, process 12", 40).startswith(
        "rank 3 (node7, process 12) is slow: its own work takes 0.84 s of update 40, the median of the ranks that do "
        "the same work is 0.41 s, so that every update waits 0.43 s for it. Look for other programs on that machine"
    )
    assert "0.50 s of it is waiting for data: check the disk" in Lag(
        rank=3, own_seconds=0.84, expected_seconds=0.41, data_seconds=0.5, has_peers=True
    ).words("x", 1)
    assert "what it took before is 0.41 s" in Lag(
        rank=3, own_seconds=0.84, expected_seconds=0.41, data_seconds=0.0, has_peers=False
    ).words("x", 1)


class _Slow(torch.autograd.Function):
    """Takes a while in the backward pass, of a rank's own."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        time.sleep(SLEEP / 2)
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        time.sleep(SLEEP / 2)
        return gradients[0]


def trained(sections: dict[str, Any], layout: Layout, rows: dict[str, Any], slow_rank: int, where: str) -> list[str]:
    """What rank 0 reports of a run in which one rank is slow in its computation or in reading its data."""
    recorder = Recorder()
    runner = TrainingRunner(
        Parameters.from_mapping(sections), Environment(execution_provider="CPU", threads=1), [recorder], progress=False
    )
    runner.initialize(InMemoryDataLoader(rows).feature_specs())
    loader = InMemoryDataLoader(rows_of_replica(rows, runner.mesh.place.data, layout.data, exchanges.BATCH))
    if runner.mesh.rank == slow_rank and where == "data":
        batches = loader.batches

        def slowly(*arguments: Any) -> Iterator[Any]:
            for batch in batches(*arguments):
                time.sleep(SLEEP)
                yield batch

        loader.batches = slowly  # type: ignore[method-assign]
    elif runner.mesh.rank == slow_rank:
        for network in runner.state.networks:
            network.register_forward_hook(lambda module, given, output: _slowed(output))
    runner.run(loader)
    return [text for text in recorder.messages if "is slow" in text] if runner.mesh.rank == 0 else []


def _slowed(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return _Slow.apply(output) if output.requires_grad else output  # type: ignore[no-untyped-call]
    if isinstance(output, dict):
        return {name: _slowed(value) for name, value in output.items()}
    return type(output)(_slowed(value) for value in output)


LAYOUTS = [
    Layout(2, 1, 1),
    Layout(2, 1, 1, {"zero_stage": 1}),
    Layout(2, 1, 1, {"zero_stage": 3}),
    Layout(1, 2, 1),
    Layout(2, 1, 2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("where", ["computing", "data"])
def test_the_slow_rank_is_named_in_every_layout(where: str, layout: Layout, tmp_path: Path) -> None:
    sections = exchanges.sections_of(tmp_path, layout, 6)
    # Of 10 to 30 on an idle machine; on a busy one another rank may take twice as long as its peer.
    sections["distributed"] |= {"slow_rank_period": 2, "slow_rank_ratio": 4.0}
    (said, *_) = call_on_ranks(layout.world_size, trained, sections, layout, exchanges.data_of(6), 1, where)
    assert len(said) == 1, said
    assert said[0].startswith("rank 1 ("), said
    assert ("is waiting for data" in said[0]) == (where == "data")


def test_nobody_is_named_where_all_are_alike(tmp_path: Path) -> None:
    layout = Layout(2, 1, 1)
    sections = exchanges.sections_of(tmp_path, layout, 6)
    sections["distributed"] |= {"slow_rank_period": 1, "slow_rank_ratio": 20.0}
    assert call_on_ranks(2, trained, sections, layout, exchanges.data_of(6), -1, "") == [[], []]


def test_the_waiting_of_torch_is_as_before_after_a_run(tmp_path: Path) -> None:
    assert torch.distributed.Work.wait.__qualname__ != "WaitClock.measuring.<locals>.wait"
