"""Pruning: masks of torch's pruning, the cubic schedule, exact zeros in what is exported, in every layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn
from torch.nn.utils import prune

from onward.data.in_memory import InMemoryDataLoader
from onward.engine.building.preparation import plan_run, read_training_graph
from onward.engine.callbacks import Callback
from onward.engine.forecast.plan_forecast import forecast
from onward.engine.reports import UpdateReport
from onward.engine.weight_pruning import smallest, smallest_two_of_four
from onward.errors import ModelError
from onward.parameters import Parameters
from onward.plan.topology import Topology
from onward.runner import TrainingRunner
from tests.invariants.cases import CASES
from tests.invariants.layouts import Layout, Result, tensor_difference, train
from tests.invariants.rank_pool import end_ranks
from tests.mlp import assert_same_bits, data, start, state_bits, write_sgd_run
from tests.parameters.test_checks import refusal

SLOWLY = {"pattern": "magnitude", "sparsity": 0.75, "start_update": 2, "end_update": 6, "every_updates": 2}


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    yield
    end_ranks()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.9])
def test_the_smallest_elements_are_those_of_torch(share: float) -> None:
    module = nn.Linear(13, 7)
    expected = module.weight.detach().clone()
    prune.l1_unstructured(module, "weight", amount=share)
    pruned = smallest(expected.abs(), share)
    assert torch.equal(~pruned, module.weight_mask.bool())
    equal = smallest(torch.ones(10), 0.3)
    assert equal.tolist() == [True] * 3 + [False] * 7


@pytest.mark.parametrize("axis", [0, 1])
def test_two_of_four_keep_the_two_largest(axis: int) -> None:
    weight = torch.randn(8, 12, generator=torch.Generator().manual_seed(0)).abs()
    pruned = smallest_two_of_four(weight, axis)
    groups = weight.masked_fill(pruned, 0).movedim(axis, -1).reshape(-1, 4)
    expected = weight.movedim(axis, -1).reshape(-1, 4).topk(2, dim=1).values
    assert (groups > 0).sum(1).tolist() == [2] * 24
    torch.testing.assert_close(groups.sum(1), expected.sum(1))


class Counting(Callback):
    """The share of zeros in a weight after each update, of which none is negative."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def on_update(self, report: UpdateReport) -> None:
        weight = self.control.net.weights["w1"]
        assert not torch.signbit(weight[weight == 0]).any()
        self.shares.append(float((weight == 0).float().mean()))


@pytest.mark.parametrize(
    ("averaging", "optimizer"),
    [({}, "AdamW"), ({"kind": "ema", "decay": 0.9}, "AdamW"), ({}, "AdamWScheduleFree")],
    ids=["", "with an average", "with the average of the optimizer"],
)
def test_the_schedule_and_the_exported_zeros(tmp_path: Path, averaging: dict[str, Any], optimizer: str) -> None:
    """`s (1 - (1 - t)^3)` at t = 0, 1/2 and 1; biases are dense; zeros stay zero under momentum and weight decay."""
    counting = Counting()
    runner, recorder = start(
        tmp_path, counting, pruning=SLOWLY, averaging=averaging, paths={"output_dir": tmp_path / "out"},
        optimizer={"training_optimizer_name": optimizer, "optimizer_attributes": [{"lambda": 0.1}]},
    )  # fmt: skip
    runner.run(InMemoryDataLoader(data(32)))
    half = round(0.75 * (1 - 0.5**3) * 48) / 48
    assert counting.shares == pytest.approx([0, 0, 0, half, half, 0.75, 0.75, 0.75])
    runner.end_training()
    written = {
        one.name: numpy_helper.to_array(one)
        for one in onnx.load(tmp_path / "out" / "mlp_trained.onnx").graph.initializer
    }
    assert {name: float((array == 0).mean()) for name, array in written.items()} == pytest.approx(
        {"w1": 0.75, "b1": 0, "w2": 0.75, "b2": 0}
    )
    assert "pruning: 2 of 4 weights (w1, w2)." in recorder.messages


def test_iterations_equal_those_of_torch(tmp_path: Path) -> None:
    """The same weights pruned twice by torch have the same masks."""
    asked = {"pattern": "magnitude", "sparsity": 0.6, "initial_sparsity": 0.4, "end_update": 2, "weights": ["w2"]}
    runner, _ = start(tmp_path, pruning=asked, learning_rate={"initial_lr": 1e-9})
    before = runner.net.weights["w2"].detach().clone()
    runner.run(InMemoryDataLoader(data(32)))
    module = nn.Linear(1, 1, bias=False)
    module.weight = nn.Parameter(before)
    for left in (round(0.4 * 32), round(0.6 * 32) - round(0.4 * 32)):
        prune.l1_unstructured(module, "weight", amount=left)
    assert torch.equal(runner.net.weights["w2"] != 0, module.weight_mask.bool())
    assert (runner.net.weights["w1"] != 0).all()


def test_two_of_four_along_what_is_summed_over(tmp_path: Path) -> None:
    """w1 is [6, 8]: its six inputs are no multiple of four."""
    runner, recorder = start(tmp_path, pruning={"pattern": "2:4"})
    runner.run(InMemoryDataLoader(data(32)))
    zeros = (runner.net.weights["w2"] == 0).T.reshape(-1, 4)
    assert zeros.sum(1).tolist() == [2] * 8
    assert (runner.net.weights["w1"] != 0).all()
    assert any(
        "pruning: 'w1' stays dense: no sum over a multiple of four elements." in one for one in recorder.messages
    )


class Failing(Callback):
    """Fails after an update; the state before is saved."""

    def __init__(self, update: int) -> None:
        self.update = update

    def on_update(self, report: UpdateReport) -> None:
        if report.update == self.update:
            raise ZeroDivisionError


@pytest.mark.parametrize("update", [1, 4, 6])
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, update: int) -> None:
    """Interrupted before pruning, between two prunings, and after the last."""

    def run(folder: str, *watchers: Callback) -> TrainingRunner:
        settings = {"checkpoints_dir": tmp_path / folder, "checkpoint_period": 1}
        adam = {"training_optimizer_name": "Adam"}
        runner, _ = start(tmp_path, *watchers, pruning=SLOWLY, checkpoint=settings, optimizer=adam)
        runner.run(InMemoryDataLoader(data(32)))
        return runner

    expected = state_bits(run("at once"))
    with pytest.raises(ZeroDivisionError):
        run("in two", Failing(update + 1))
    resumed = run("in two")
    assert resumed.resumed_update in (update, update + 1)
    assert_same_bits(state_bits(resumed), expected)
    assert bool(expected["pruned/w1"].any())


LAYOUTS = {
    "ZeRO 1": Layout(2, 1, 1, {"zero_stage": 1}),
    "ZeRO 3": Layout(2, 1, 1, {"zero_stage": 3}),
    "tensor parallel": Layout(1, 2, 1),
    "pipeline": Layout(1, 1, 2),
}
PATTERNS = {
    "magnitude": {"pattern": "magnitude", "sparsity": 0.6, "start_update": 2, "end_update": 4},
    "2:4": {"pattern": "2:4", "start_update": 2},
}


def spread(layout: Layout, pattern: str) -> Result:
    return train(CASES["tied_words"], layout, accumulation=2, sections={"pruning": PATTERNS[pattern]})


@pytest.fixture(scope="module")
def one_process() -> dict[str, Result]:
    return {pattern: spread(Layout(), pattern) for pattern in PATTERNS}


RUNS: list[Any] = [(name, "magnitude") for name in LAYOUTS]
RUNS += [pytest.param(name, "2:4", marks=[] if name == "ZeRO 3" else pytest.mark.slow) for name in LAYOUTS]


@pytest.mark.parametrize(("name", "pattern"), RUNS)
def test_every_layout_prunes_like_one_process(name: str, pattern: str, one_process: dict[str, Result]) -> None:
    expected, actual = one_process[pattern], spread(LAYOUTS[name], pattern)
    masks = [key for key in expected.tensors if key.startswith("pruned/")]
    assert len(masks) >= 5
    for key in masks:
        assert torch.equal(actual.tensors[key], expected.tensors[key]), key
        weight = actual.tensors[key.replace("pruned/", "weights/")]
        assert torch.equal(weight == 0, expected.tensors[key])
        assert float(expected.tensors[key].float().mean()) == pytest.approx(
            0.6 if pattern == "magnitude" else 0.5, abs=0.01
        )
    assert tensor_difference(actual, expected, ("weights/",)) < 5e-6


def test_a_plan_forecasts_the_masks(tmp_path: Path) -> None:
    run = write_sgd_run(tmp_path)
    asked = Parameters.load(run, {"pruning.pattern": "magnitude", "pruning.sparsity": "0.5"})
    graph = read_training_graph(asked)
    found = forecast(asked, graph, plan_run(asked, Topology(), graph, {}))
    assert found.ranks[0].memory.kinds["masks"] == 6 * 8 + 8 * 4


def test_weights_that_are_not_there(tmp_path: Path) -> None:
    asked = {"pattern": "magnitude", "sparsity": 0.5}
    with pytest.raises(ModelError, match=r"pruning\.weights: 'w9' matches none of the 4 trainable weights\."):
        start(tmp_path, pruning={**asked, "weights": ["w9"]})
    with pytest.raises(ModelError, match="no trainable weight can be pruned: 'w1' do not sum over a multiple of four"):
        start(tmp_path, pruning={"pattern": "2:4", "weights": ["w1"]})


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"pattern": "magnitude"}, "pruning.sparsity is missing; pruning.pattern magnitude needs the share of zeros"),
        ({"pattern": "4:8"}, "pruning.pattern is '4:8'; expected 'magnitude' or '2:4'"),
        ({"pattern": "magnitude", "sparsity": 1.0}, "pruning.sparsity is 1.0"),
        (
            {"pattern": "magnitude", "sparsity": 0.5, "initial_sparsity": 0.6},
            "pruning.initial_sparsity is 0.6, above pruning.sparsity, which is 0.5; what is pruned stays zero.",
        ),
        (
            {"pattern": "magnitude", "sparsity": 0.5, "start_update": 5, "end_update": 4},
            "pruning.end_update is 4, before pruning.start_update, which is 5",
        ),
        (
            {"pattern": "magnitude", "sparsity": 0.5, "end_update": 13},
            "pruning.end_update is 13, but the run has 12 updates; set 12 or less.",
        ),
        ({"pattern": "2:4", "sparsity": 0.5}, "it has an effect only with pruning.pattern magnitude"),
    ],
)
def test_what_is_refused(asked: dict[str, Any], words: str) -> None:
    assert words in refusal(pruning=asked)


def test_the_pattern_needs_no_quotes(tmp_path: Path) -> None:
    """YAML reads 2:4 as 124, a number to the base of 60."""
    assert Parameters.load(write_sgd_run(tmp_path), {"pruning.pattern": "2:4"}).pruning.pattern == "2:4"
