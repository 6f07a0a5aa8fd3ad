"""Runs of different settings in one process train as each does in its own process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.distributed as dist

from onward.data.in_memory import InMemoryDataLoader
from onward.engine.building.preparation import plan_run, read_training_graph
from onward.engine.forecast.plan_forecast import forecast
from onward.models import create_model
from onward.parameters import Parameters
from onward.plan.topology import Topology
from onward.runner import TrainingRunner
from tests.mlp import ON_ONE_THREAD, assert_same_bits, data, parameters, save_mlp, state_bits
from tests.ranks import run_on_ranks

MOMENTS = ("norm_mean", "norm_var")


def of_images(folder: Path, channels_last: bool) -> Parameters:
    path = folder / "images.onnx"
    if not path.exists():
        ir.save(create_model("mnist", variant="conv", channels=3, image_size=12, dropout=0.0), path)
    sections: dict[str, Any] = {
        "paths": {"model_path": path},
        "loss": {"type": "softmax_cross_entropy", "prediction": "predictions", "label": "label"},
        "training": {"batch_size": 8, "num_train_steps": 3},
        "learning_rate": {"initial_lr": 0.05},
        "optimizer": {"training_optimizer_name": "SGD"},
        "speed": {"channels_last": channels_last},
    }
    return Parameters.from_mapping(sections)


def images() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    pixels = generator.normal(size=(24, 3, 12, 12)).astype(np.float32)
    return {"X": pixels, "label": generator.integers(0, 10, 24)}


def ready(folder: Path, channels_last: bool) -> TrainingRunner:
    runner = TrainingRunner(of_images(folder, channels_last), ON_ONE_THREAD)
    runner.initialize(InMemoryDataLoader(images()).feature_specs())
    return runner


def trained(runner: TrainingRunner) -> dict[str, torch.Tensor]:
    runner.run(InMemoryDataLoader(images()))
    return state_bits(runner)


def test_two_runs_of_different_layouts_of_images(tmp_path: Path) -> None:
    """Both are built before either trains; and again side by side, on two threads."""
    alone = {last: trained(ready(tmp_path, last)) for last in (True, False)}
    assert any(not torch.equal(alone[True][name], alone[False][name]) for name in alone[True]), (
        "else this shows nothing"
    )
    for side_by_side in (False, True):
        for last, bits in train_both(tmp_path, side_by_side).items():
            assert_same_bits(bits, alone[last])


def train_both(folder: Path, side_by_side: bool) -> dict[bool, dict[str, torch.Tensor]]:
    """One after the other, or on two threads at once."""
    runners = {last: ready(folder, last) for last in (True, False)}
    with ThreadPoolExecutor(2 if side_by_side else 1) as pool:
        return dict(zip(runners, pool.map(trained, runners.values()), strict=True))


def test_the_forecast_follows_the_layout_of_images(tmp_path: Path) -> None:
    peaks = []
    for last in (True, False):
        asked = of_images(tmp_path, last)
        graph = read_training_graph(asked, asked.paths.model_path)
        plan = plan_run(asked, Topology(), graph, {})
        peaks.append(forecast(asked, graph, plan).ranks[0].memory.total)
    assert peaks[0] != peaks[1]


def running_statistics(folder: str, rounds: int) -> list[dict[str, list[float]]]:
    """Of one of two replicas that have different data, after each round."""
    sections: dict[str, Any] = {
        "training": {
            "batch_size": 4, "num_train_steps": 4, "gradient_accumulation_steps": 2, "find_batch_size": True
        },
        "distributed": {"data_parallel_size": 2, "synchronize_batch_norm": True},
        "machine": {"memory_gb": 1.0},
    }  # fmt: skip
    asked = parameters(Path(folder), **sections)
    runner = TrainingRunner(asked, ON_ONE_THREAD)
    runner.initialize()
    found = []
    for turn in range(rounds):
        if turn:
            runner.update_parameters(asked)
        own = {name: array[dist.get_rank() :: 2] for name, array in data(96, seed=turn).items()}
        runner.run(InMemoryDataLoader(own))
        states = dict(runner.state.networks[0].net.named_buffers())
        found.append({name: states[name].tolist() for name in runner.state.networks[0].net.graph.states})
    return found


def test_statistics_stay_synchronized_after_a_batch_size_is_found(tmp_path: Path) -> None:
    save_mlp(tmp_path, normalized=True)
    one, other = run_on_ranks(2, running_statistics, str(tmp_path), 2)
    assert len(one) == 2
    assert all(found for found in one)
    assert one[0] != one[1]
    assert one == other
