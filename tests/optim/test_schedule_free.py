"""Schedule-Free AdamW against its formula and the package schedulefree; its average is what a run gives out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from onward.cli import main
from onward.data.in_memory import InMemoryDataLoader
from onward.errors import ParametersError
from onward.optim.building import make_optimizer, set_learning_rate
from onward.optim.schedule_free import AdamWScheduleFree
from onward.runner import TrainingRunner
from tests import mlp
from tests.optim.peers import UPDATES, give_gradients, optimizer_of, weights

RULE = {"lambda": 0.1, "alpha": 0.8, "beta": 0.95, "epsilon": 1e-6}
RATES = [0.01 * min(1.0, (step + 1) / 5) for step in range(UPDATES)]
"""Five updates of warm-up."""


def trained(given: dict[str, Any]) -> AdamWScheduleFree:
    optimizer = make_optimizer(optimizer_of("AdamWScheduleFree", [RULE]), given)
    for step, rate in enumerate(RATES):
        give_gradients(given, step)
        set_learning_rate(optimizer, rate)
        optimizer.step()
    assert isinstance(optimizer, AdamWScheduleFree)
    return optimizer


def test_it_equals_its_formula() -> None:
    """Weights and averages in float64, to 2e-6 of the largest element."""
    ours, start = weights(), weights()
    optimizer = trained(ours)
    for name, weight in start.items():
        x = y = z = weight.detach().numpy().astype(np.float64)
        v, total = np.zeros_like(x), 0.0
        for step, rate in enumerate(RATES):
            give_gradients(start, step)
            gradient = start[name].grad
            assert gradient is not None
            g = gradient.numpy().astype(np.float64)
            v = 0.95 * v + 0.05 * g**2
            total += rate**2
            share = rate**2 / total
            z = z - rate * (g / (np.sqrt(v / (1 - 0.95 ** (step + 1))) + 1e-6) + 0.1 * y)
            x = (1 - share) * x + share * z
            y = 0.2 * z + 0.8 * x
        bound = 2e-6 * np.abs(x).max()
        assert np.abs(ours[name].detach().numpy() - y).max() <= bound
        assert np.abs(optimizer.average_of(ours[name]).numpy() - x).max() <= bound


def test_it_equals_the_package() -> None:
    """To 1e-6 of the largest element, in training mode and evaluated."""
    package = pytest.importorskip("schedulefree", reason="the package is a peer for comparison only")
    ours, theirs = weights(), weights()
    optimizer = trained(ours)
    peer = package.AdamWScheduleFree(theirs.values(), betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, lr=0.01)
    peer.train()
    for step, rate in enumerate(RATES):
        give_gradients(theirs, step)
        peer.param_groups[0]["lr"] = rate
        peer.step()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-6 * float(weight.detach().abs().max()))
    peer.eval()
    for name, weight in theirs.items():
        expected = weight.detach()
        found = optimizer.average_of(ours[name])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


def test_an_alpha_of_0_has_no_average() -> None:
    with pytest.raises(ParametersError, match="alpha is 0, with which AdamWScheduleFree cannot average"):
        make_optimizer(optimizer_of("AdamWScheduleFree", [{"alpha": 0.0}]), weights())


def test_a_run_evaluates_and_exports_the_average_and_trains_on(tmp_path: Path) -> None:
    """Of a run that evaluates after 4 of 6 steps, the bits of one that does not; its files hold the average."""
    results = []
    for period in (0, 4):
        folder = tmp_path / str(period)
        folder.mkdir()
        mlp.save_mlp(folder)
        parameters = mlp.parameters(
            folder,
            loss=mlp.SQUARES,
            paths={"output_dir": str(folder / "out")},
            training={"batch_size": 8, "num_train_steps": 6, "evaluation_period": period},
            learning_rate={"initial_lr": 0.05},
            optimizer={"training_optimizer_name": "AdamWScheduleFree"},
            checkpoint={"checkpoints_dir": str(folder / "checkpoints")},
        )
        runner = TrainingRunner(parameters, mlp.ON_ONE_THREAD, progress=False)
        runner.initialize()
        test = InMemoryDataLoader(mlp.data(16, seed=1))
        runner.run(InMemoryDataLoader(mlp.data(48)), test)
        state = runner.state
        results.append({name: weight.parameter.detach().clone() for name, weight in state.weights.items()})
        average = state.average.tensors if state.average is not None else {}
        runner.end_training(test)
    assert all(torch.equal(results[0][name], tensor) for name, tensor in results[1].items())
    assert not torch.allclose(average["w1"], results[1]["w1"], atol=1e-4)
    assert initializer(folder / "out" / "mlp_trained.onnx", "w1") == pytest.approx(average["w1"].numpy(), abs=0)
    command = ["export", str(folder / "mlp.onnx"), "--checkpoint", str(folder / "checkpoints")]
    assert main([*command, "-o", str(folder / "exported.onnx")]) == 0
    assert initializer(folder / "exported.onnx", "w1") == pytest.approx(average["w1"].numpy(), abs=0)


def initializer(path: Path, name: str) -> np.ndarray:
    (found,) = [tensor for tensor in onnx.load(path).graph.initializer if tensor.name == name]
    return numpy_helper.to_array(found)
