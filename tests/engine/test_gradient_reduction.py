"""What is exchanged around an update, in a world of one: nothing, and gradients and norms are the plain ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onward.engine.gradient_reduction import GradientReduction
from onward.parallel.launch.process import in_world_of_one
from onward.parameters.distributed import Distributed


class Weight:
    def __init__(self, gradient: torch.Tensor | None, shape: tuple[int, ...]) -> None:
        self.gradient, self.full_shape, self.copies = gradient, shape, 1

    def take_gradient(self) -> torch.Tensor | None:
        return self.gradient


def state() -> Any:
    weights = {"a": Weight(torch.tensor([3.0, 0.0]), (2,)), "b": Weight(torch.tensor(4.0), ()), "c": Weight(None, (2,))}
    return SimpleNamespace(weights=weights, statistics=lambda: {"mean": torch.tensor([1.0, 2.0])})


def test_alone_gradients_are_taken_as_they_are_and_weights_without_one_left_out() -> None:
    reduction = GradientReduction(mesh=in_world_of_one(), distributed=Distributed())
    here = state()
    found = reduction.finish(here)
    assert {name: gradient.tolist() for name, gradient in found.items()} == {"a": [3.0, 0.0], "b": 4.0}
    assert float(reduction.total_norm(here, found)) == 5.0
    reduction.average_statistics(here)
    assert here.statistics()["mean"].tolist() == [1.0, 2.0]
    assert reduction.sum_over_replicas(torch.tensor([2.0])).tolist() == [2.0]


@pytest.mark.parametrize(
    ("zero_stage", "is_wrapped", "expected"), [(0, True, []), (2, True, ["b"]), (0, False, ["a", "b", "c"])]
)
def test_what_no_engine_has_reduced(zero_stage: int, is_wrapped: bool, expected: list[str]) -> None:
    """ZeRO leaves out single numbers; without an engine around the modules nothing is reduced."""
    parameters = Distributed(data_parallel_size=2, zero_stage=zero_stage)  # type: ignore[arg-type]
    reduction = GradientReduction(mesh=in_world_of_one(), distributed=parameters, replicas_are_wrapped=is_wrapped)
    assert reduction._not_reduced(state()) == expected
