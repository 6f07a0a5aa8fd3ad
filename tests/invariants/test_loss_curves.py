"""Training an ONNX file follows training the same network written for torch, with torch's own optimizers.

50 steps in fp32, same weights, same data: every loss within 1e-4 relative, for every optimizer and schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from onward.data.in_memory import InMemoryDataLoader
from onward.environment import Environment
from onward.models import create_model
from onward.parameters import Parameters
from onward.runner import TrainingRunner
from tests.models import test_bert, test_gpt2, test_mnist, test_squeezenet
from tests.models.running import initial_weights, replace_weights, shake
from tests.watching import Recorder

STEPS = 50
BATCH = 4
WARMUP_STEPS = 10
BOUND = 1e-4

Loss = Callable[[nn.Module, Mapping[str, torch.Tensor]], torch.Tensor]


# ------------------------------------------------------------------------------------------ optimizers, independently


class PaperLamb:
    """LAMB as in You et al. 2020, algorithm 2, without bias correction, one weight at a time."""

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float) -> None:
        self.param_groups, self.betas, self.eps = groups, betas, eps
        self.moments: dict[nn.Parameter, tuple[torch.Tensor, torch.Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        b1, b2 = self.betas
        for group in self.param_groups:
            for w in group["params"]:
                m, v = self.moments.get(w, (torch.zeros_like(w), torch.zeros_like(w)))
                m, v = b1 * m + (1 - b1) * w.grad, b2 * v + (1 - b2) * w.grad**2
                self.moments[w] = (m, v)
                direction = m / (v.sqrt() + self.eps) + group["weight_decay"] * w
                norm, length = float(w.norm()), float(direction.norm())
                ratio = norm / length if norm > 0 and length > 0 else 1.0
                w -= group["lr"] * ratio * direction

    def zero_grad(self) -> None:
        for group in self.param_groups:
            for w in group["params"]:
                w.grad = None


OPTIMIZERS: dict[str, tuple[float, dict[str, Any], Callable[[list[dict[str, Any]]], Any]]] = {
    "SGDOptimizer": (0.03, {}, lambda groups: torch.optim.SGD(groups, lr=1.0)),
    "SGDOptimizer with Nesterov momentum": (
        0.02,
        {"momentum": 0.9, "nesterov": True},
        lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=0.9, nesterov=True),
    ),
    "Adam": (3e-3, {"alpha": 0.9, "beta": 0.95}, lambda groups: torch.optim.Adam(groups, lr=1.0, betas=(0.9, 0.95))),
    "AdamW": (3e-3, {"alpha": 0.9, "beta": 0.95}, lambda groups: torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95))),
    "Lamb": (1e-2, {"alpha": 0.9, "beta": 0.95}, lambda groups: PaperLamb(groups, (0.9, 0.95), 1e-6)),
}
SCHEDULES: dict[str, Callable[[float, float], float]] = {
    # share of the round that is over, share of warm-up -> factor after the warm-up
    "none": lambda r, w: 1.0,
    "constant": lambda r, w: 1.0,
    "linear": lambda r, w: (1 - r) / (1 - w),
    "polynomial": lambda r, w: math.sqrt((1 - r) / (1 - w)),
    "cosine": lambda r, w: 0.5 * (1 + math.cos(math.pi * (r - w) / (1 - w))),
}


def rate_factor(mode: str, step: int) -> float:
    r, w = step / STEPS, WARMUP_STEPS / STEPS
    if mode != "none" and r < w:
        return r / w
    return SCHEDULES[mode](r, w)


# ---------------------------------------------------------------------------------------------------- the two runs


def torch_losses(
    network: nn.Module,
    loss_of: Loss,
    data: Mapping[str, np.ndarray],
    optimizer: str,
    schedule: str,
    clip: float | None,
    scale_of_rate: float = 1.0,
) -> list[float]:
    rate, _, make = OPTIMIZERS[optimizer]
    rate *= scale_of_rate
    decayed = [p for p in network.parameters() if p.ndim > 1]
    others = [p for p in network.parameters() if p.ndim <= 1]
    engine = make([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
    network.train()
    samples = len(next(iter(data.values())))
    losses = []
    for step in range(1, STEPS + 1):
        rows = [(i % samples) for i in range((step - 1) * BATCH, step * BATCH)]
        batch = {name: torch.from_numpy(array[rows]) for name, array in data.items()}
        loss = loss_of(network, batch)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(network.parameters(), clip)
        for group in engine.param_groups:
            group["lr"] = rate * rate_factor(schedule, step)
        engine.step()
        engine.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def onward_losses(
    folder: Path,
    model: ir.Model,
    loss: dict[str, Any],
    data: Mapping[str, np.ndarray],
    optimizer: str,
    schedule: str,
    clip: float | None,
    scale_of_rate: float = 1.0,
) -> list[float]:
    ir.save(model, folder / "model.onnx")
    rate, attributes, _ = OPTIMIZERS[optimizer]
    vectors = [name for name, value in model.graph.initializers.items() if value.shape.rank() <= 1]
    parameters = Parameters.from_mapping(
        {
            "paths": {"model_path": folder / "model.onnx"},
            "loss": loss,
            "training": {"batch_size": BATCH, "num_train_steps": STEPS, "display_loss_steps": 1},
            "learning_rate": {
                "initial_lr": rate * scale_of_rate,
                "warmup_mode": schedule,
                "warmup_steps": None if schedule == "none" else WARMUP_STEPS,
            },
            "optimizer": {
                "training_optimizer_name": optimizer.split()[0],
                "max_norm_clip": clip,
                "optimizer_attributes": [
                    {"weights": "*", "lambda": 0.1, **attributes},
                    {"weights": vectors, "lambda": 0.0},
                ],
            },
        }
    )
    recorder = Recorder()
    runner = TrainingRunner(parameters, Environment(execution_provider="CPU"), [recorder], progress=False)
    runner.initialize()
    runner.run(InMemoryDataLoader(data))
    return recorder.losses


def assert_same_curve(actual: list[float], expected: list[float]) -> None:
    assert len(actual) == len(expected) == STEPS
    worst = max(abs(a - e) / abs(e) for a, e in zip(actual, expected, strict=True))
    assert worst < BOUND, f"losses differ by {worst:.2e} relative"
    assert len(set(expected)) > STEPS // 2, "losses that stand still would prove nothing"


# ------------------------------------------------------------------------------------------------------- the models


def random(*shape: int, below: int | None = None, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    if below is None:
        return generator.random(shape, dtype=np.float32)
    return generator.integers(0, below, shape)


def gpt2_case() -> tuple[ir.Model, nn.Module, Loss, dict[str, Any], dict[str, np.ndarray]]:
    model = create_model("gpt2", dropout=0.0, **test_gpt2.SMALL)
    weights = shake(initial_weights(model))
    replace_weights(model, weights)

    def loss(network: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logits = network(batch["input_ids"]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    data = {"input_ids": random(12, 16, below=61), "labels": random(12, 16, below=61, seed=1)}
    spec = {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"}
    return model, test_gpt2.peer(weights), loss, spec, data


def bert_case() -> tuple[ir.Model, nn.Module, Loss, dict[str, Any], dict[str, np.ndarray]]:
    model = create_model("bert", dropout=0.0, **test_bert.SMALL)
    weights = shake(initial_weights(model))
    replace_weights(model, weights)

    def loss(network: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        result = network(batch["input1"], attention_mask=batch["input3"], token_type_ids=batch["input2"])
        places = batch["masked_lm_positions"].unsqueeze(-1).expand(-1, -1, result.prediction_logits.shape[-1])
        picked = result.prediction_logits.gather(1, places)
        masked = nn.functional.cross_entropy(picked.flatten(0, 1), batch["masked_lm_ids"].flatten(), ignore_index=0)
        return masked + nn.functional.cross_entropy(result.seq_relationship_logits, batch["next_sentence_labels"])

    ids = random(12, 5, below=60, seed=2) + 1
    ids[:, 4] = 0  # padding: not every sample has five masked places
    data = {
        "input1": random(12, 16, below=61),
        "input2": random(12, 16, below=2, seed=1),
        "input3": (np.arange(16)[None] < random(12, 1, below=8, seed=3) + 9).astype(np.int64),
        "masked_lm_positions": random(12, 5, below=9, seed=4),
        "masked_lm_ids": ids,
        "next_sentence_labels": random(12, below=2, seed=5),
    }
    return model, test_bert.peer(weights), loss, {"type": "bert"}, data


def image_case(name: str) -> tuple[ir.Model, nn.Module, Loss, dict[str, Any], dict[str, np.ndarray]]:
    if name == "squeezenet":
        model = create_model("squeezenet", image_size=8, channels=1, classes=10, batch_norm=True, dropout=0.0)
        network: nn.Module = test_squeezenet.small_normalized_network()
        size = 8
    else:
        model = create_model("mnist", variant="conv", image_size=9, dropout=0.0)
        network, size = test_mnist.conv_network(True), 9
    weights = shake(initial_weights(model)) if name == "mnist" else initial_weights(model)
    replace_weights(model, weights)
    state = [key for key in network.state_dict() if "num_batches" not in key]
    network.load_state_dict(dict(zip(state, weights.values(), strict=True)), strict=False)
    output = str(model.graph.outputs[0].name)
    image = str(model.graph.inputs[0].name)

    def loss(one: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(one(batch[image]), batch["labels"])

    # Every sample is seen once: a network that knows its data by heart has losses near 0, where rounding rules.
    data = {image: random(200, 1, size, size), "labels": random(200, below=10, seed=1)}
    spec = {"type": "softmax_cross_entropy", "prediction": output, "label": "labels"}
    return model, network, loss, spec, data


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gpt2_with_every_optimizer_and_schedule(tmp_path: Path, optimizer: str, schedule: str) -> None:
    model, network, loss, spec, data = gpt2_case()
    clip = 1.0 if schedule in ("linear", "cosine") else None
    expected = torch_losses(network, loss, data, optimizer, schedule, clip)
    assert_same_curve(onward_losses(tmp_path, model, spec, data, optimizer, schedule, clip), expected)


@pytest.mark.parametrize("optimizer", ["SGDOptimizer", "AdamW", "Lamb"])
@pytest.mark.parametrize("name", ["bert", "squeezenet", "mnist"])
def test_the_other_reference_models(tmp_path: Path, name: str, optimizer: str) -> None:
    model, network, loss, spec, data = bert_case() if name == "bert" else image_case(name)
    # Batch normalization over four small images turns last bits into digits at the full rate: torch's own AdamW
    # differs from its fused kernel by 4e-2 after 50 steps, and SGD between two kinds of processor by 6e-4. At a small
    # part of the rate the curves can be compared.
    scale = 1.0 if name != "squeezenet" else 0.1 if optimizer == "SGDOptimizer" else 0.001
    expected = torch_losses(network, loss, data, optimizer, "cosine", 1.0, scale)
    assert_same_curve(onward_losses(tmp_path, model, spec, data, optimizer, "cosine", 1.0, scale), expected)
