"""Averages of the weights: as `torch.optim.swa_utils` makes them, in every layout, saved, evaluated and exported."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from onward.cli import main
from onward.commands.planning import plan
from onward.data.in_memory import InMemoryDataLoader
from onward.engine.building.preparation import plan_run, read_training_graph
from onward.engine.callbacks import Callback
from onward.engine.forecast.plan_forecast import forecast
from onward.engine.reports import UpdateReport
from onward.errors import ParametersError
from onward.fitting.fit import fit
from onward.parameters import Averaging, Parameters
from onward.plan.topology import Topology
from onward.runner import TrainingRunner
from tests.invariants.cases import CASES
from tests.invariants.layouts import Layout, Result, tensor_difference, train
from tests.invariants.rank_pool import end_ranks
from tests.mlp import assert_same_bits, data, save_mlp, start, state_bits, weights_of, write_sgd_run
from tests.parameters.test_checks import refusal

EMA = {"kind": "ema", "decay": 0.9}
SWA = {"kind": "swa", "start_update": 2, "every_updates": 2}


class Following(Callback):
    """Averages by torch's own class after every update."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked, self.model, self.own = asked, nn.Module(), {}  # type: ignore[var-annotated]
        self.average: AveragedModel | None = None

    def on_update(self, report: UpdateReport) -> None:
        for name, tensor in self.control.net.tensors_by_name().items():
            if not hasattr(self.model, name):
                self.model.register_buffer(name, tensor.detach().clone())
            getattr(self.model, name).copy_(tensor.detach())
        if self.average is None:
            formula = get_swa_multi_avg_fn() if self.asked["kind"] == "swa" else get_ema_multi_avg_fn(0.9)
            self.average = AveragedModel(self.model, multi_avg_fn=formula, use_buffers=True)
        since = report.update - self.asked.get("start_update", 0)
        if since > 0 and since % self.asked.get("every_updates", 1) == 0:
            self.average.update_parameters(self.model)


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    yield
    end_ranks()


def exported(path: Path) -> dict[str, torch.Tensor]:
    return {one.name: torch.from_numpy(numpy_helper.to_array(one).copy()) for one in onnx.load(path).graph.initializer}


@pytest.mark.parametrize("asked", [EMA, SWA], ids=["ema", "swa"])
def test_the_average_is_that_of_torch_and_is_exported(tmp_path: Path, asked: dict[str, Any]) -> None:
    """Running statistics included; the weights that train are as without an average."""
    save_mlp(tmp_path, normalized=True)
    following = Following(asked)
    plain, _ = start(tmp_path)
    plain.run(InMemoryDataLoader(data(32)))
    runner, _ = start(tmp_path, following, averaging=asked, paths={"output_dir": tmp_path / "out"})
    runner.run(InMemoryDataLoader(data(32)))
    assert_same_bits(weights_of(runner), weights_of(plain))
    assert following.average is not None
    expected = dict(following.average.module.named_buffers())
    average = runner.state.average
    assert average is not None
    assert average.count == (8 if asked is EMA else 3)
    assert {"running_mean", "w1"} <= average.tensors.keys()
    for name, tensor in average.tensors.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-7)
    assert not torch.equal(average.tensors["w1"], runner.net.weights["w1"])
    report = runner.end_training(InMemoryDataLoader(data(16, seed=1)))
    written = exported(tmp_path / "out" / "mlp_trained.onnx")
    assert_same_bits({name: written[name] for name in average.tensors}, average.tensors)
    assert report is not None
    assert report.metrics["loss"] != report.metrics["loss_of_last"]
    assert report.metrics["loss_of_last"] == plain.evaluate(InMemoryDataLoader(data(16, seed=1))).metrics["loss"]
    assert_same_bits(weights_of(runner), weights_of(plain))  # what trains is in its place again


def test_the_last_weights_are_exported_where_that_is_asked(tmp_path: Path) -> None:
    asked = {**EMA, "export": "last"}
    runner, _ = start(tmp_path, averaging=asked, paths={"output_dir": tmp_path / "out"})
    runner.run(InMemoryDataLoader(data(32)))
    report = runner.end_training(InMemoryDataLoader(data(16)))
    assert report is not None
    assert set(report.metrics) == {"loss", "accuracy", "loss_of_average", "accuracy_of_average"}
    written = exported(tmp_path / "out" / "mlp_trained.onnx")
    assert_same_bits({name: written[name] for name in runner.net.weights}, weights_of(runner))


def test_before_averaging_begins_the_weights_stand_for_the_average(tmp_path: Path) -> None:
    asked = {"kind": "swa", "start_update": 100}
    runner, _ = start(tmp_path, averaging=asked, paths={"output_dir": tmp_path / "out"})
    runner.run(InMemoryDataLoader(data(32)))
    report = runner.end_training(InMemoryDataLoader(data(16)))
    assert report is not None
    assert report.metrics["loss"] == report.metrics["loss_of_last"]
    written = exported(tmp_path / "out" / "mlp_trained.onnx")
    assert_same_bits({name: written[name] for name in runner.net.weights}, weights_of(runner))


@pytest.mark.parametrize("first", [1, 5], ids=["before averaging", "while averaging"])
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, first: int) -> None:
    def run(steps: int, folder: str) -> TrainingRunner:
        runner, _ = start(
            tmp_path,
            averaging=SWA,
            training={"num_train_steps": steps},
            learning_rate={"warmup_mode": "none"},
            optimizer={"training_optimizer_name": "AdamW"},
            checkpoint={"checkpoints_dir": tmp_path / folder},
        )
        if runner.round == 0:
            runner.run(InMemoryDataLoader(data(32)))
        return runner

    save_mlp(tmp_path, normalized=True)
    expected = state_bits(run(8, "at once"))
    run(first, "in two")
    resumed = run(8, "in two")
    assert resumed.state.average is not None
    assert resumed.state.average.count == 3
    assert_same_bits(state_bits(resumed), expected)


def test_a_checkpoint_without_an_average_begins_one(tmp_path: Path) -> None:
    folder = {"checkpoints_dir": tmp_path / "checkpoints"}
    start(tmp_path, checkpoint=folder, training={"num_train_steps": 2})[0].run(InMemoryDataLoader(data(32)))
    resumed, _ = start(tmp_path, averaging={"kind": "swa"}, checkpoint=folder, training={"num_train_steps": 3})
    resumed.run(InMemoryDataLoader(data(32)))
    average = resumed.state.average
    assert average is not None
    assert average.count == 1
    assert_same_bits(average.tensors, {name: resumed.net.weights[name].detach() for name in average.tensors})


KINDS = ("weights/", "average/")
LAYOUTS = {
    "replicas": Layout(2, 1, 1),
    "ZeRO 1": Layout(2, 1, 1, {"zero_stage": 1}),
    "ZeRO 3": Layout(2, 1, 1, {"zero_stage": 3}),
    "tensor parallel": Layout(1, 2, 1),
    "pipeline": Layout(1, 1, 2),
}


@pytest.fixture(scope="module")
def one_process() -> Result:
    return spread(Layout())


def spread(layout: Layout) -> Result:
    case = CASES["tied_words"]
    return train(case, layout, accumulation=2, test_samples=5, sections={"averaging": {**SWA, "every_updates": 1}})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "ZeRO 1" else name for name in LAYOUTS]
)
def test_every_layout_averages_like_one_process(name: str, one_process: Result) -> None:
    actual = spread(LAYOUTS[name])
    names = {kind: {name.partition("/")[2] for name in actual.tensors if name.startswith(kind)} for kind in KINDS}
    assert names["weights/"] == names["average/"]
    assert tensor_difference(actual, one_process, KINDS) < 5e-6
    assert actual.metrics[-1] == pytest.approx(one_process.metrics[-1], rel=1e-5)
    assert actual.metrics[-1]["loss"] != actual.metrics[-1]["loss_of_last"]


def test_export_of_a_checkpoint_takes_the_average_or_the_last_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_sgd_run(tmp_path, averaging=EMA, checkpoint={"checkpoints_dir": "checkpoints"})
    assert main(["train", str(run)]) == 0
    assert "trained model with the average (ema) of its weights after 8 updates" in capsys.readouterr().out
    command = ["export", str(tmp_path / "mlp.onnx"), "--checkpoint", str(tmp_path / "checkpoints"), "-o"]
    files = {name: tmp_path / f"{name}.onnx" for name in ("asked", "average", "last")}
    assert main([*command, str(files["asked"])]) == 0
    for name in ("average", "last"):
        assert main([*command, str(files[name]), "--weights", name]) == 0
    assert_same_bits(exported(files["asked"]), exported(tmp_path / "out" / "mlp_trained.onnx"))
    assert_same_bits(exported(files["asked"]), exported(files["average"]))
    assert not torch.equal(exported(files["last"])["w1"], exported(files["average"])["w1"])
    assert main(["export", str(tmp_path / "mlp.onnx"), "--optimize", "-o", "x.onnx", "--weights", "last"]) == 2
    assert "--weights last chooses weights of a checkpoint; pass --checkpoint DIR." in capsys.readouterr().err


def test_an_average_that_is_not_there_cannot_be_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_sgd_run(tmp_path, checkpoint={"checkpoints_dir": "checkpoints"})
    assert main(["train", str(run)]) == 0
    command = ["export", str(tmp_path / "mlp.onnx"), "--checkpoint", str(tmp_path / "checkpoints")]
    assert main([*command, "-o", str(tmp_path / "a.onnx"), "--weights", "average"]) == 2
    assert "the checkpoint holds no average of the weights" in capsys.readouterr().err


@pytest.mark.parametrize("saved", [False, True], ids=["in memory", "from a checkpoint"])
def test_fit_returns_the_best_average(tmp_path: Path, saved: bool) -> None:
    """The best evaluation is the first one: its average, not that of the end, is in the result."""
    features = {name: array for name, array in data(32).items() if name != "target"}
    sections: dict[str, Any] = {
        "averaging": {"kind": "ema", "decay": 0.5},
        "learning_rate": {"initial_lr": 30.0},
        "training": {"evaluation_period": 2, "batch_size": 4, "num_train_steps": 8},
        "early_stopping": {"patience": 9},
    }
    if saved:
        sections["checkpoint"] = {"checkpoints_dir": str(tmp_path / "c"), "keep_best": True}
    result = fit(save_mlp(tmp_path), features, validation_data=features, parameters=sections, progress=False)
    best = result.metrics["loss"]
    assert best == min(result.history.evaluations["loss"]) < result.history.evaluations["loss"][-1]
    assert result.evaluate(features)["loss"] == pytest.approx(best, rel=1e-6)
    again = fit(result.export(tmp_path / "best.onnx"), features, steps=1, learning_rate=0.0, progress=False)
    assert again.evaluate(features)["loss"] == pytest.approx(best, rel=1e-6)


def test_a_plan_forecasts_the_average(tmp_path: Path) -> None:
    run = write_sgd_run(tmp_path)
    for fields, expected in ((None, 0), ({"averaging.kind": "ema"}, 4 * (6 * 8 + 8 + 8 * 4 + 4))):
        asked = Parameters.load(run, fields)
        graph = read_training_graph(asked)
        found = forecast(asked, graph, plan_run(asked, Topology(), graph, {}))
        assert found.ranks[0].memory.kinds["averages"] == expected
    assert "averages" not in plan(run)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"kind": "mean"}, "averaging.kind is 'mean'; expected 'ema' or 'swa'"),
        ({"kind": "ema", "decay": 1.0}, "averaging.decay is 1.0"),
        (
            {"kind": "swa", "decay": 0.9},
            "averaging.decay is 0.9, but it has an effect only with averaging.kind ema. Change that, or remove "
            "averaging.decay.",
        ),
        ({"kind": "ema", "every_updates": 0}, "averaging.every_updates is 0"),
    ],
)
def test_what_is_refused(asked: dict[str, Any], words: str) -> None:
    assert words in refusal(averaging=asked)


def test_a_field_without_a_kind_is_reported(tmp_path: Path) -> None:
    _, recorder = start(tmp_path, averaging={"start_update": 5})
    assert any("averaging.start_update is 5, but it has an effect only with" in text for text in recorder.messages)


def test_rounds_share_the_average(tmp_path: Path) -> None:
    runner, _ = start(tmp_path, averaging=EMA)
    with pytest.raises(ParametersError, match="averaging cannot change between rounds of one run"):
        runner.update_parameters(dataclasses.replace(runner.parameters, averaging=Averaging()))
