"""What a mark remembers, and a run that goes on beside another kind of processor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from onward.checkpoint.manifest import TensorEntry
from onward.data.batches import DataCursor
from onward.engine.state import Counters, fit_random_states
from tests.mlp import assert_same_bits, save_mlp, start, state_bits


def test_returning_to_the_mark_undoes_all_but_weights_and_moments(tmp_path: Path) -> None:
    save_mlp(tmp_path, normalized=True)
    runner, _ = start(tmp_path)
    state = runner.state
    state.counters, state.cursor = Counters(step=4, update=2, samples=16), DataCursor(epoch=1, sample=3)
    state.mark()
    before, record = state_bits(runner), state.record()
    torch.rand(3)
    state.counters.step += 1
    state.cursor = DataCursor(epoch=2)
    own = runner.net.tensors_by_name()
    own["running_mean"].fill_(float("nan"))
    own["w1"].grad = torch.ones_like(own["w1"])
    state.return_to_mark()
    assert_same_bits(state_bits(runner), before)
    assert state.record() == record
    assert own["w1"].grad is None
    state.counters.step += 1
    state.return_to_mark()
    assert state.record() == record, "the mark is no part of the state"


def test_without_a_mark_there_is_nothing_to_return_to(tmp_path: Path) -> None:
    runner, _ = start(tmp_path)
    runner.state.counters.step = 3
    runner.state.return_to_mark()
    assert runner.state.counters.step == 3


@pytest.mark.parametrize("stored_on_gpu", [False, True])
@pytest.mark.parametrize("runs_on_gpu", [False, True])
def test_the_random_state_of_a_gpu_is_read_where_both_have_one(stored_on_gpu: bool, runs_on_gpu: bool) -> None:
    """Checkpoints are read by exactly the names they hold, whichever processor goes on."""
    on_cpu = {"weights/w": torch.ones(2), "random/cpu": torch.zeros(5056, dtype=torch.uint8)}
    gpu = {"random/cuda": torch.zeros(16, dtype=torch.uint8)}
    stored = {name: TensorEntry.of(tensor) for name, tensor in {**on_cpu, **(gpu if stored_on_gpu else {})}.items()}
    tensors = {**on_cpu, **(gpu if runs_on_gpu else {})}
    fit_random_states(tensors, stored)
    assert {name: TensorEntry.of(tensor) for name, tensor in tensors.items()} == stored
