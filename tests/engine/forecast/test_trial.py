"""A trial that runs out of memory has failed, and a smaller one follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onward.engine.building.preparation import read_training_graph
from onward.engine.forecast import batch_size
from onward.engine.forecast.batch_size import find_batch_size
from onward.engine.forecast.trial import trial_bytes
from onward.errors import ParametersError
from onward.parallel.launch.process import in_world_of_one
from onward.parameters import Parameters
from tests.engine.forecast.limited_memory import found_by_one, gpt2_parameters, save_gpt2


def test_a_trial_that_runs_out_of_memory_is_followed_by_a_smaller_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def scarce(parameters: Parameters, *_: Any) -> float | None:
        tried.append(parameters.training.batch_size)
        return None if tried[-1] > 3 else 1.0

    monkeypatch.setattr(batch_size, "trial_bytes", scarce)
    assert found_by_one(gpt2_parameters(save_gpt2(tmp_path), 1.0)) == 2
    assert tried == [8, 4, 2]


def test_out_of_memory_in_a_step_is_a_trial_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    asked = gpt2_parameters(save_gpt2(tmp_path), 1.0)
    graph = read_training_graph(asked, asked.paths.model_path)
    monkeypatch.setattr("onward.engine.steps.Steps.update", full)
    assert trial_bytes(asked, in_world_of_one(), graph, {}) is None
    with pytest.raises(ParametersError, match=r"one of 1 samples ran out of memory on trial. Save memory by recompute"):
        find_batch_size(asked, in_world_of_one(), graph, {})
