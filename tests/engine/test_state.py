"""What a mark remembers, and a run that continues next to another kind of processor."""

from __future__ import annotations

from pathlib import Path

import torch

from onward.data.batches import DataCursor
from onward.engine.state import Counters
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
