"""Local SGD in every layout follows its paper's algorithm, carried out in one process with torch's own optimizers."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onward
from onward.cli import main
from onward.data.in_memory import InMemoryDataLoader
from onward.engine.callbacks import Callback
from onward.engine.reports import EvaluationReport, RunSummary, UpdateReport
from onward.environment import Environment
from onward.errors import Interrupted
from onward.parallel.gathering import gather_full
from onward.parameters import Parameters
from onward.runner import TrainingRunner
from tests.initializers import stored_arrays
from tests.invariants.cases import CASES
from tests.invariants.layouts import Layout, Result, merged_sections, rows_of_replica, train, train_here
from tests.invariants.rank_pool import call_on_ranks, end_ranks

RATE = 3e-3
DILOCO = {"sync_every_updates": 2}
MEAN = {"sync_every_updates": 3, "outer_optimizer": "sgd"}
CLIPPING = {"optimizer": {"max_norm_clip": 0.1}}
DECAY = {"learning_rate": {"warmup_mode": "linear"}}


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    yield
    end_ranks()


@dataclass
class Worker:
    """A replica of the model that trains by itself."""

    net: Any
    optimizer: torch.optim.Optimizer
    data: list[dict[str, torch.Tensor]]

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        return dict(self.net.weights)

    @property
    def statistics(self) -> dict[str, torch.Tensor]:
        tensors = self.net.tensors_by_name()
        return {name: tensors[name] for name in self.net.graph.states}

    def update(self, number: int, accumulation: int, clip: float | None, rate: float) -> float:
        parts = self.data[number * accumulation : (number + 1) * accumulation]
        loss = loss_of(self.net, {key: torch.cat([part[key] for part in parts]) for key in parts[0]})
        loss.backward()
        if not loss.isfinite():
            self.optimizer.zero_grad()
            return float(loss.detach())
        if clip is not None:
            nn.utils.clip_grad_norm_(self.weights.values(), clip)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def loss_of(net: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    names = [str(value.name) for value in net.graph.source.graph.inputs]
    found = net(*(batch[name] for name in names))
    if "labels" in batch:
        return F.cross_entropy(found.flatten(0, -2), batch["labels"].flatten(), ignore_index=-100)
    return F.mse_loss(found, batch["target"])


@dataclass
class Reference:
    """What the algorithm ends with."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    statistics: dict[str, torch.Tensor]
    momentum: dict[str, torch.Tensor]
    workers: list[Worker]


def simulate(
    name: str,
    folder: Path,
    layout: Layout,
    workers: int,
    accumulation: int = 1,
    clip: float | None = None,
    decays: bool = False,
    updates: int = 6,
    data: Mapping[str, np.ndarray] | None = None,
) -> Reference:
    """Algorithm 1 of DiLoCo, worker by worker."""
    case, batch = CASES[name], 8
    data = case.data(batch * accumulation * updates) if data is None else data
    asked = {"outer_optimizer": "nesterov", **layout.distributed}
    every, is_nesterov = asked["sync_every_updates"], asked["outer_optimizer"] == "nesterov"
    made = []
    for worker in range(workers):
        net = onward.to_torch(folder / "model.onnx", **case.training)
        net.train()
        rows = rows_of_replica(data, worker, workers, batch)
        size = batch // workers
        parts = [
            {key: torch.from_numpy(array[at : at + size].copy()) for key, array in rows.items()}
            for at in range(0, size * accumulation * updates, size)
        ]
        made.append(Worker(net, torch.optim.AdamW(net.weights.values(), RATE, eps=1e-4, weight_decay=0.1), parts))
    outer = {key: nn.Parameter(weight.detach().clone()) for key, weight in made[0].weights.items()}
    statistics = {key: one.clone() for key, one in made[0].statistics.items()}
    momentum = asked.get("outer_momentum", 0.9 if is_nesterov else 0.0)
    rate = asked.get("outer_lr", 0.7 if is_nesterov else 1.0)
    optimizer = torch.optim.SGD(outer.values(), rate, momentum, nesterov=is_nesterov)
    losses = []
    for update in range(updates):
        step = (update + 1) * accumulation
        of_rate = RATE * (1 - step / (updates * accumulation)) if decays else RATE
        losses.append(float(np.mean([one.update(update, accumulation, clip, of_rate) for one in made])))
        if (update + 1) % every == 0 or update + 1 == updates:
            with torch.no_grad():
                for key, weight in outer.items():
                    weight.grad = torch.stack([weight - one.weights[key] for one in made]).mean(0)
                optimizer.step()
                statistics = {key: torch.stack([w.statistics[key] for w in made]).mean(0) for key in statistics}
                for one in made:
                    for key, weight in one.weights.items():
                        weight.copy_(outer[key])
                    for key, tensor in one.statistics.items():
                        tensor.copy_(statistics[key])
    slots = {key: optimizer.state[weight].get("momentum_buffer") for key, weight in outer.items()}
    return Reference(
        losses,
        {key: weight.detach() for key, weight in outer.items()},
        statistics,
        {key: slot for key, slot in slots.items() if slot is not None},
        made,
    )


def largest(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], prefix: str) -> float:
    """The largest difference of a tensor relative to its largest element."""
    mine = {name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)}
    assert mine.keys() == expected.keys()
    return max(
        float((mine[name] - tensor).abs().max()) / max(float(tensor.abs().max()), 1e-3)
        for name, tensor in expected.items()
    )


def assert_follows(
    name: str, layout: Layout, workers: int, folder: Path, accumulation: int = 1, **sections: Any
) -> None:
    folder.mkdir(exist_ok=True)
    result = train(CASES[name], layout, accumulation=accumulation, sections=sections, folder=str(folder))
    clip = sections.get("optimizer", {}).get("max_norm_clip")
    expected = simulate(name, folder, layout, workers, accumulation, clip, "learning_rate" in sections)
    bound = 1e-10 if name.endswith("64") else 5e-6
    assert result.losses == pytest.approx(expected.losses, rel=1e-6)
    assert len(set(result.losses)) == 6
    assert largest(result.tensors, expected.weights, "weights/") < bound
    if expected.momentum:
        assert largest(result.tensors, expected.momentum, "outer/momentum_buffer/") < 20 * bound
    if expected.statistics:
        assert largest(result.tensors, expected.statistics, "states/") < bound
    for number, worker in enumerate(expected.workers):
        slots = {key: worker.optimizer.state[weight]["exp_avg"] for key, weight in worker.weights.items()}
        at = f"workers/{number}/slots/exp_avg/" if number else "slots/exp_avg/"
        assert largest(result.tensors, slots, at) < 20 * bound


def layout(data: int, horizontal: int, pipeline: int, **distributed: Any) -> Layout:
    return Layout(data, horizontal, pipeline, distributed)


ON_TWO = [
    ("gpt2", layout(2, 1, 1, **DILOCO), 2, {**CLIPPING, **DECAY}),
    ("tied_words", layout(2, 1, 1, **MEAN), 1, {}),
    ("u_net_64", layout(2, 1, 1, sync_every_updates=4), 1, {}),
]
ON_FOUR = [
    ("gpt2", layout(4, 1, 1, replicas_per_worker=2, **DILOCO), 2, CLIPPING),
    ("tied_words", layout(4, 1, 1, zero_stage=3, zero_group_size=2, **DILOCO), 2, CLIPPING),
    ("tied_words", layout(2, 1, 2, **DILOCO, outer_lr=0.5, outer_momentum=0.8), 2, CLIPPING),
    ("gpt2", layout(2, 2, 1, **MEAN), 1, CLIPPING),
    ("gpt2", layout(2, 1, 1, context_parallel_size=2, **DILOCO), 1, CLIPPING),
    ("mixtures", layout(4, 1, 1, expert_parallel_size=2, **DILOCO), 1, CLIPPING),
]


def name_of(run: tuple[Any, ...]) -> str:
    return f"{run[0]} {run[1]}"


@pytest.mark.parametrize("run", ON_TWO, ids=name_of)
def test_two_workers_are_the_algorithm(run: tuple[str, Layout, int, Any], tmp_path: Path) -> None:
    name, spread, accumulation, sections = run
    assert_follows(name, spread, 2, tmp_path / "run", accumulation, **sections)


@pytest.mark.parametrize("run", ON_FOUR, ids=name_of)
def test_workers_of_several_ranks_are_the_algorithm(run: tuple[str, Layout, int, Any], tmp_path: Path) -> None:
    name, spread, accumulation, sections = run
    assert_follows(name, spread, 2, tmp_path / "run", accumulation, **sections)


@pytest.mark.parametrize(
    "sections",
    [{"adapter": {"rank": 2}}, {"mixed_precision": {"use_mixed_precision": True, "use_bfloat16": True}}],
    ids=["adapters", "bf16"],
)
def test_synchronized_at_every_update_by_sgd_it_is_data_parallelism(sections: dict[str, Any]) -> None:
    """The mean of steps along the workers' gradients is the step along their mean."""
    sgd = {"optimizer": {"training_optimizer_name": "SGD", "optimizer_attributes": []}}
    asked = {**sgd, "learning_rate": {"initial_lr": 0.1}, **sections}
    expected = train(CASES["mlp"], Layout(2, 1, 1), sections=asked)
    spread = layout(2, 1, 1, sync_every_updates=1, outer_optimizer="sgd")
    actual = train(CASES["mlp"], spread, sections=asked)
    assert actual.losses == pytest.approx(expected.losses, rel=1e-6)
    weights = {name: tensor for name, tensor in expected.tensors.items() if name.startswith("weights/")}
    assert (
        largest(actual.tensors, {name.removeprefix("weights/"): one for name, one in weights.items()}, "weights/")
        < 5e-6
    )
    assert len(set(actual.losses)) == 6


def run(folder: Path, name: str, updates: int, spread: Layout, model: str = "tied_words", **sections: Any) -> Result:
    """A run whose checkpoints of every third update and trained model stay in a folder; its data are for six."""
    place = folder / name
    where = {
        "checkpoint": {"checkpoints_dir": str(place / "checkpoints"), "checkpoint_period": 3, "max_num_checkpoints": 9},
        "paths": {"output_dir": str(place / "out"), "model_path": str(place / "model.onnx")},
        **{key: value for key, value in sections.items() if key != "checkpoint"},
    }
    where["checkpoint"] |= sections.get("checkpoint", {})
    return train(
        CASES[model], spread, updates=updates, updates_of_data=6, sections=where, folder=str(place), test_samples=6
    )


def trained(folder: Path, name: str) -> dict[str, np.ndarray]:
    return stored_arrays(folder / name / "out" / "model_trained.onnx")


TWO = layout(2, 1, 1, **DILOCO)
CHECKED = {"machine": {"check_weights_period": 1}, "data": {"test_data": "partitioned"}}


@pytest.mark.parametrize(
    ("spread", "model"),
    [
        (TWO, "gpt2_with_dropout"),
        pytest.param(layout(4, 1, 1, zero_stage=3, zero_group_size=2, **DILOCO), "tied_words", marks=pytest.mark.slow),
        pytest.param(layout(2, 1, 2, pipeline_schedule="GPipe", **DILOCO), "gpt2_with_dropout", marks=pytest.mark.slow),
        pytest.param(layout(2, 2, 1, **DILOCO), "gpt2_with_dropout", marks=pytest.mark.slow),
        pytest.param(layout(4, 1, 1, expert_parallel_size=2, **DILOCO), "mixtures", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_resumes_between_two_synchronizations_bit_by_bit(spread: Layout, model: str, tmp_path: Path) -> None:
    """Every worker's own weights, moments, random numbers and loss scale, and the outer optimizer's momentum."""
    fp16 = {"mixed_precision": {"use_mixed_precision": True, "loss_scale": 0}}
    sections = {**CHECKED, **(fp16 if model == "gpt2_with_dropout" else {})}
    expected = run(tmp_path, "whole", 6, spread, model, **sections)
    start = str(tmp_path / "whole" / "checkpoints" / "checkpoint-00000003")
    actual = run(tmp_path, "part", 6, spread, model, checkpoint={"checkpoint_to_load_path": start}, **sections)
    assert actual.losses == expected.losses[3:]
    assert (actual.loss_scale, actual.skipped) == (expected.loss_scale, expected.skipped)
    assert actual.metrics == expected.metrics
    assert {name.split("/")[0] for name in expected.tensors} >= {"weights", "slots", "workers", "outer"}
    for name, tensor in expected.tensors.items():
        assert torch.equal(actual.tensors[name], tensor), name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six updates of two workers, evaluated after three, and one of two updates."""
    folder = tmp_path_factory.mktemp("runs")
    run(folder, "two", 2, TWO)
    result = run(folder, "six", 6, TWO, training={"evaluation_period": 3})
    (folder / "metrics").write_text(str([one["loss"] for one in result.metrics]))
    return folder


def test_between_two_synchronizations_the_last_one_is_evaluated_and_exported(runs: Path, tmp_path: Path) -> None:
    """After three updates, the weights of the second."""
    expected, target = trained(runs, "two"), tmp_path / "three.onnx"
    checkpoint = runs / "six" / "checkpoints" / "checkpoint-00000003"
    command = ["export", str(runs / "six" / "model.onnx"), "--checkpoint", str(checkpoint), "-o", str(target)]
    assert main(command) == 0
    exported = stored_arrays(target)
    assert all(exported[name].tobytes() == array.tobytes() for name, array in expected.items())
    of_two = run(tmp_path, "again", 2, TWO).metrics[-1]["loss"]
    after_three, after_six = map(float, (runs / "metrics").read_text().strip("[]").split(","))
    assert after_three == of_two != after_six


def test_the_last_update_of_a_round_synchronizes(tmp_path: Path) -> None:
    """Five updates, synchronized every four: nothing that a worker found is left out of the trained model."""
    spread = layout(2, 1, 1, sync_every_updates=4, outer_optimizer="sgd")
    result = run(tmp_path, "five", 5, spread)
    (tmp_path / "reference").mkdir()
    shutil.copy(tmp_path / "five" / "model.onnx", tmp_path / "reference" / "model.onnx")
    expected = simulate("tied_words", tmp_path / "reference", spread, 2, updates=5)
    written = trained(tmp_path, "five")
    for name, tensor in expected.weights.items():
        assert torch.equal(result.tensors[f"weights/{name}"], result.tensors[f"workers/1/weights/{name}"])
        np.testing.assert_allclose(written[name], tensor.numpy(), rtol=0, atol=1e-5)


class Stops(Callback):
    """Ends a round, or its process, after an update."""

    def __init__(self, update: int, is_signal: bool) -> None:
        self.update, self.is_signal = update, is_signal
        self.evaluations: list[EvaluationReport] = []

    def on_update(self, report: UpdateReport) -> None:
        if report.update == self.update:
            if self.is_signal:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                self.control.stop("enough")

    def on_evaluation(self, report: EvaluationReport) -> None:
        self.evaluations.append(report)


@dataclass
class Ended:
    """What a rank ends with."""

    update: int
    summary: RunSummary | None
    evaluations: list[EvaluationReport]
    tensors: dict[str, torch.Tensor]


def end_here(
    sections: Mapping[str, Any], parts: list[dict[str, np.ndarray]], test: Mapping[str, np.ndarray], stops: Stops
) -> Ended:
    runner = TrainingRunner(
        Parameters.from_mapping(sections),
        Environment(execution_provider="CPU", threads=1),
        [stops],
        progress=False,
    )
    runner.initialize(InMemoryDataLoader(parts[0]).feature_specs())
    tests, summary = InMemoryDataLoader(test) if test else None, None
    try:
        summary = runner.run(InMemoryDataLoader(parts[runner.mesh.reader], last_batch="wrap"), tests)
        runner.end_training(tests)
    except Interrupted:
        pass
    tensors = {name: one for name, one in runner.state.sharded_tensors().items() if not name.startswith("random/")}
    return Ended(runner.state.counters.update, summary, stops.evaluations, gather_full(runner.mesh, tensors))


def end(folder: Path, spread: Layout, stops: Stops, **sections: Any) -> tuple[Ended, dict[str, np.ndarray]]:
    """Two workers that are ended before their 12 updates are over, and their data."""
    case = CASES["tied_words"]
    data = case.data(12 * 8 + 6)
    test = {name: array[12 * 8 :] for name, array in data.items()}
    data = {name: array[: 12 * 8] for name, array in data.items()}
    folder.mkdir(exist_ok=True)
    ir.save(case.model(), folder / "model.onnx")
    where = {"paths": {"output_dir": str(folder / "out"), "model_path": str(folder / "model.onnx")}, **sections}
    merged = merged_sections(case, spread, folder, 8, 12, 1, where)
    parts = [rows_of_replica(data, replica, 2, 8) for replica in range(2)]
    first, second = call_on_ranks(2, end_here, merged, parts, test, stops)
    assert first.update == second.update
    return first, data


def assert_is_trained(found: Ended, folder: Path, spread: Layout, updates: int, data: Mapping[str, np.ndarray]) -> None:
    """The workers and the model are what the algorithm ends with after so many updates, the last one synchronized."""
    expected = simulate("tied_words", folder, spread, 2, updates=updates, data=data)
    written, start = stored_arrays(folder / "out" / "model_trained.onnx"), stored_arrays(folder / "model.onnx")
    assert largest(found.tensors, expected.weights, "weights/") < 5e-6
    assert largest(found.tensors, expected.weights, "workers/1/weights/") < 5e-6
    for name, tensor in expected.weights.items():
        np.testing.assert_allclose(written[name], tensor.numpy(), rtol=0, atol=1e-5)
        assert np.abs(written[name] - start[name]).max() > 1e-3


def test_a_round_that_a_callback_ends_synchronizes(tmp_path: Path) -> None:
    """Before the first synchronization: without this one, the trained model would be the untrained one."""
    spread = layout(2, 1, 1, sync_every_updates=500, outer_optimizer="sgd")
    found, data = end(tmp_path, spread, Stops(3, False), training={"evaluation_period": 3})
    assert found.update == 3
    assert_is_trained(found, tmp_path, spread, 3, data)
    (before, after) = found.evaluations  # at the end of training the last one is not made again
    assert (before.update, before.weights_update, after.update, after.weights_update) == (3, 0, 3, 3)
    assert found.summary is not None
    assert found.summary.metrics == after.metrics != before.metrics


@pytest.mark.parametrize("is_compared", [True, False], ids=["best", "last"])
def test_a_round_that_early_stopping_ends_synchronizes(is_compared: bool, tmp_path: Path) -> None:
    """After evaluations of the updates 4 and 8, with the outer optimizer's step for 9 and 10 on top.

    The best checkpoint is that of the last update, so it and what is exported are of the synchronized weights.
    """
    spread = layout(2, 1, 1, **{**DILOCO, "sync_every_updates": 4})
    best = {"checkpoints_dir": str(tmp_path / "checkpoints"), "keep_best": True, "export": "best"}
    found, data = end(
        tmp_path,
        spread,
        Stops(99, False),
        training={"evaluation_period": 5},
        early_stopping={"patience": 1, "min_delta": 1e9},
        checkpoint=best if is_compared else {},
    )
    assert (found.update, [one.weights_update for one in found.evaluations]) == (10, [4, 8, 10])
    losses = [one.metrics["loss"] for one in found.evaluations]
    assert losses[0] > losses[1] != losses[2]
    assert_is_trained(found, tmp_path, spread, 10, data)


def test_a_run_that_is_interrupted_resumes_as_if_it_were_not(tmp_path: Path) -> None:
    """It does not synchronize out of turn."""
    kept = {"checkpoints_dir": str(tmp_path / "part" / "checkpoints")}
    spread = layout(2, 1, 1, sync_every_updates=4)
    whole, _ = end(tmp_path / "whole", spread, Stops(99, False))
    part, _ = end(tmp_path / "part", spread, Stops(5, True), checkpoint=kept)
    assert part.summary is None
    assert 4 < part.update < 8
    weights = [name for name in part.tensors if name.startswith("weights/")]
    assert any(not torch.equal(part.tensors[name], part.tensors[f"workers/1/{name}"]) for name in weights)
    rest, _ = end(tmp_path / "part", spread, Stops(99, False), checkpoint=kept)
    assert rest.update == whole.update == 12
    for name, tensor in whole.tensors.items():
        assert torch.equal(rest.tensors[name], tensor), name


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("six", Layout(), "the checkpoint is of 2 workers (distributed.sync_every_updates), this run has 1: it starts"),
        (
            "plain",
            TWO,
            "of a run without distributed.sync_every_updates: its 2 workers start with the same weights and moments",
        ),
    ],
    ids=["to one process", "from one process"],
)
def test_another_number_of_workers_starts_from_the_synchronized_weights(
    before: str, after: Layout, words: str, runs: Path, tmp_path: Path
) -> None:
    if before == "plain":
        run(runs, "plain", 6, Layout())
    start = runs / before / "checkpoints" / "checkpoint-00000003"
    # No step is left at update 3 of 3: it loads, and writes the model.
    result = run(tmp_path, "next", 3, after, checkpoint={"checkpoint_to_load_path": str(start)})
    assert any(words in message for message in result.messages), result.messages
    if before == "six":
        assert any("the 1 updates that they took by themselves since then are left out" in m for m in result.messages)
        expected = trained(runs, "two")
        assert all(array.tobytes() == expected[name].tobytes() for name, array in trained(tmp_path, "next").items())
    else:
        for name, tensor in result.tensors.items():
            _, worker, rest = name.split("/", 2) if name.startswith("workers/") else ("", "", name)
            assert not worker or torch.equal(tensor, result.tensors[rest]), name


def test_a_worker_skips_an_update_by_itself(tmp_path: Path) -> None:
    """The other one goes on; the mean over the workers is of what both changed."""
    case, spread = CASES["mlp"], layout(2, 1, 1, sync_every_updates=4, outer_optimizer="sgd")
    data = case.data(32)
    ir.save(case.model(), tmp_path / "model.onnx")
    data["x"][16 + 4 : 16 + 8] = np.inf  # the third update of the second worker
    parts = [rows_of_replica(data, replica, 2, 8) for replica in range(2)]
    sections = merged_sections(case, spread, tmp_path, 8, 4, 1, {"on_bad_loss": {"skip": 4}})
    results = call_on_ranks(2, train_here, sections, parts, {}, "wrap")
    assert [result.skipped for result in results] == [0, 1]
    expected = simulate("mlp", tmp_path, spread, 2, updates=4, data=data)
    assert largest(results[0].tensors, expected.weights, "weights/") < 5e-6
