"""Weights that are trained from an update on: against torch by hand, in every layout, resumed, and every refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from onward.data.in_memory import InMemoryDataLoader
from onward.errors import ParametersError
from onward.runner import TrainingRunner
from tests import mlp

UNFREEZE = [{"after_updates": 2, "weights": ["w1", "b1"]}]


def run_mlp(folder: Path, steps: int, **training: Any) -> TrainingRunner:
    """Steps of 8 samples by AdamW; `runner.state` is left as it was after the last."""
    mlp.save_mlp(folder)
    parameters = mlp.parameters(
        folder,
        loss=mlp.SQUARES,
        training={"batch_size": 8, "num_train_steps": steps, **training},
        learning_rate={"initial_lr": 0.01},
        optimizer={"training_optimizer_name": "AdamW", "optimizer_attributes": [{"lambda": 0.1}]},
    )
    runner = TrainingRunner(parameters, mlp.ON_ONE_THREAD, progress=False)
    runner.initialize()
    runner.run(InMemoryDataLoader(mlp.data(8 * steps)))
    return runner


def train_by_hand(steps: int, after: int) -> tuple[dict[str, torch.nn.Parameter], torch.optim.AdamW]:
    weights = {name: torch.nn.Parameter(torch.from_numpy(array)) for name, array in mlp.weights().items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=0.01, weight_decay=0.1)
    data = {name: torch.from_numpy(array) for name, array in mlp.data(8 * steps).items()}
    for step in range(steps):
        x, target = (data[name][8 * step : 8 * step + 8] for name in ("x", "target"))
        hidden = torch.relu(x @ weights["w1"] + weights["b1"])
        torch.nn.functional.mse_loss(hidden @ weights["w2"] + weights["b2"], target).backward()
        if step < after:
            weights["w1"].grad = weights["b1"].grad = None
        optimizer.step()
        optimizer.zero_grad()
    return weights, optimizer


def test_it_equals_torch_whose_optimizer_gets_no_gradient_before(tmp_path: Path) -> None:
    """Weights to 1e-6, and the moments of the weights that were frozen begin then."""
    state = run_mlp(tmp_path, 5, unfreeze=UNFREEZE).state
    weights, optimizer = train_by_hand(5, after=2)
    for name, weight in weights.items():
        torch.testing.assert_close(state.weights[name].parameter, weight, rtol=0, atol=1e-6)
    tensors = state.sharded_tensors()
    assert {name: float(tensors[f"slots/step/{name}"].tensor) for name in weights} == {
        "w1": 3, "b1": 3, "w2": 5, "b2": 5,
    }  # fmt: skip
    expected = optimizer.state[weights["w1"]]["exp_avg"]
    torch.testing.assert_close(tensors["slots/exp_avg/w1"].tensor, expected, rtol=0, atol=1e-6)


def test_frozen_weights_cost_no_gradient_and_do_not_move(tmp_path: Path) -> None:
    state = run_mlp(tmp_path, 2, unfreeze=UNFREEZE).state
    assert {name: weight.source.requires_grad for name, weight in state.weights.items()} == {
        "w1": False, "b1": False, "w2": True, "b2": True,
    }  # fmt: skip
    for name in ("w1", "b1"):
        assert torch.equal(state.weights[name].parameter.detach(), torch.from_numpy(mlp.weights()[name]))


@pytest.mark.parametrize(
    ("training", "words"),
    [
        (
            {"unfreeze": [{"after_updates": 1, "weights": "w3*"}]},
            r"training\.unfreeze\[0\]\.weights: 'w3\*' matches none of the 4 trainable weights\. Name weights that are",
        ),
        (
            {"unfreeze": [{"after_updates": 1, "weights": "w1"}], "weights_not_to_train": ["w1"]},
            r"training\.unfreeze\[0\]\.weights: 'w1' matches none of the 3 trainable weights\.",
        ),
        (
            {"unfreeze": [{"after_updates": 3, "weights": "*"}]},
            r"training\.unfreeze names all 4 trainable weights, so that nothing is trained before update 3\. Leave out",
        ),
        ({"unfreeze": [{"weights": "w1"}]}, r"training\.unfreeze\[0\]\.after_updates is missing"),
        ({"unfreeze": [{"after_updates": 0, "weights": "w1"}]}, r"after_updates is 0; expected greater than or equal"),
    ],
)
def test_refusals(training: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ParametersError, match=words):
        run_mlp(tmp_path, 1, **training)
