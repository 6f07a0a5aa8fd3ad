"""AdamW with moments in 8 bits: torchao's bits, its state in checkpoints, and what is said where it is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from onward.errors import ParametersError
from onward.optim.building import make_optimizer, set_learning_rate, slots_by_name
from tests.invariants.cases import CASES
from tests.invariants.layouts import Layout, Result, train
from tests.invariants.rank_pool import end_ranks
from tests.optim.peers import UPDATES, optimizer_of, weights

SETTINGS = optimizer_of("AdamW8bit", [{"lambda": 0.1, "alpha": 0.8, "beta": 0.95, "epsilon": 1e-6}])


def two_weights() -> dict[str, torch.nn.Parameter]:
    """One whose moments are quantized, and a small one."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"large": (32, 128), "small": (7,)}
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def give_gradients(given: dict[str, torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for weight in given.values():
        weight.grad = torch.randn(weight.shape, generator=generator)


def test_the_bits_of_torchao() -> None:
    """After 20 updates; its state is made of plain tensors, a byte for an element."""
    peers = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    ours, theirs = two_weights(), two_weights()
    optimizer = make_optimizer(SETTINGS, ours)
    peer = peers.AdamW8bit(theirs.values(), lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    for step in range(UPDATES):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        set_learning_rate(optimizer, 0.01)
        optimizer.step()
        with torch.compiler.set_stance("force_eager"):
            peer.step()
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
    slots = slots_by_name(optimizer, ours)
    assert set(slots["large"]) == {"step"} | {
        f"{slot}.{part}" for slot in ("exp_avg", "exp_avg_sq") for part in ("codes", "scale", "qmap")
    }
    assert slots["large"]["exp_avg.codes"].dtype == torch.uint8
    assert set(slots["small"]) == {"step", "exp_avg", "exp_avg_sq"}


def run(layout: Layout, updates: int, folder: Path) -> Result:
    sections = {
        "optimizer": {"training_optimizer_name": "AdamW8bit"},
        "checkpoint": {"checkpoints_dir": str(folder / "checkpoints")},
    }
    return train(
        CASES["gpt2"], layout, updates=updates, updates_of_data=4, accumulation=2, sections=sections, folder=str(folder)
    )


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("torchao.optim", reason="torchao is not installed")
    once = run(Layout(), 4, tmp_path / "once")
    run(Layout(), 2, tmp_path / "twice")
    twice = run(Layout(), 4, tmp_path / "twice")
    assert len(twice.losses) == 2
    assert once.tensors.keys() == twice.tensors.keys()
    assert all(torch.equal(twice.tensors[name], tensor) for name, tensor in once.tensors.items())
    assert once.tensors["slots/exp_avg.codes/h.0.mlp.c_fc.weight"].any()


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(2, 1, 1), Layout(1, 1, 2)], ids=str)
def test_layouts_of_full_weights_follow_one_process(layout: Layout, tmp_path: Path) -> None:
    """Losses to 1e-5: a moment that differs in its last bit may be rounded to the next of 256 values."""
    pytest.importorskip("torchao.optim", reason="torchao is not installed")
    expected = run(Layout(), 4, tmp_path / "one")
    try:
        found = run(layout, 4, tmp_path / "many")
    finally:
        end_ranks()
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)


def test_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    words = r"is AdamW8bit, which needs the package torchao\. Install it with `pip install 'onward\[torchao\]'`, or"
    with pytest.raises(ParametersError, match=words):
        make_optimizer(SETTINGS, weights())
