"""One run in many layouts: models, data cut for every replica, and what each layout ends with, for the laws of equality."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onward.data.in_memory import InMemoryDataLoader
from onward.environment import Environment
from onward.models import create_model
from onward.parallel.gathering import gather_whole
from onward.parameters import Parameters
from onward.runner import TrainingRunner
from tests.models.running import initial_weights, replace_weights, shake
from tests.ranks import run_on_ranks
from tests.watching import Recorder


@dataclass(frozen=True)
class Case:
    """A model, its loss, and its data, enough for every update once."""

    model: Callable[[], ir.Model]
    loss: Mapping[str, Any]
    data: Callable[[int], dict[str, np.ndarray]]


@dataclass(frozen=True)
class Layout:
    """How a run is spread: sizes of the mesh, and fields of any section beside them."""

    data: int = 1
    horizontal: int = 1
    pipeline: int = 1
    distributed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.data * self.horizontal * self.pipeline

    def sections(self) -> dict[str, Any]:
        sizes = {
            "data_parallel_size": self.data,
            "horizontal_parallel_size": self.horizontal,
            "pipeline_parallel_size": self.pipeline,
        }
        return {"distributed": {**sizes, **self.distributed}}


@dataclass(frozen=True)
class Result:
    """What a run ends with: losses of its reports, gradient norms, and every tensor of its state, whole."""

    losses: list[float]
    norms: list[float]
    tensors: dict[str, torch.Tensor]


def train(
    case: Case,
    layout: Layout,
    *,
    global_batch: int = 8,
    updates: int = 6,
    accumulation: int = 1,
    sections: Mapping[str, Mapping[str, Any]] | None = None,
    folder: str | None = None,
) -> Result:
    """Trains a case in a layout; `global_batch` samples make a micro-batch of all replicas together."""
    arguments = (case, layout, global_batch, updates, accumulation, dict(sections or {}))
    with tempfile.TemporaryDirectory() as own:
        where = folder or own
        Path(where).mkdir(exist_ok=True)
        model = case.model()
        ir.save(model, Path(where) / "model.onnx")
        if layout.world_size == 1:
            return train_here(where, *arguments)
        results = run_on_ranks(layout.world_size, train_here, where, *arguments)
    for other in results[1:]:
        assert other.losses == results[0].losses, "every rank knows the same losses"
        assert other.norms == results[0].norms
    return results[0]


def train_here(
    folder: str,
    case: Case,
    layout: Layout,
    global_batch: int,
    updates: int,
    accumulation: int,
    sections: Mapping[str, Mapping[str, Any]],
) -> Result:
    """The part of one rank."""
    merged: dict[str, dict[str, Any]] = {
        "paths": {"model_path": str(Path(folder) / "model.onnx")},
        "loss": dict(case.loss),
        "training": {
            "batch_size": global_batch // layout.data,
            "num_train_steps": updates * accumulation,
            "gradient_accumulation_steps": accumulation,
            "display_loss_steps": 1,
        },
        "learning_rate": {"initial_lr": 3e-3},
        "optimizer": {"training_optimizer_name": "AdamW", "optimizer_attributes": [{"lambda": 0.1, "epsilon": 1e-4}]},
        **layout.sections(),
    }
    for name, fields in sections.items():
        merged[name] = {**merged.get(name, {}), **fields}
    recorder = Recorder()
    runner = TrainingRunner(Parameters.from_mapping(merged), Environment(execution_provider="CPU"), [recorder])
    data = case.data(global_batch * updates * accumulation)
    runner.initialize(InMemoryDataLoader(data).feature_specs())
    runner.run(InMemoryDataLoader(rows_of_replica(data, runner.mesh.place.data, layout.data, global_batch)))
    runner.end_training()
    return Result(
        [report.loss for report in recorder.steps],
        [report.gradient_norm for report in recorder.steps],
        gather_whole(runner.mesh, {k: v for k, v in runner.state.pieces().items() if not k.startswith("random/")}),
    )


def rows_of_replica(data: Mapping[str, np.ndarray], replica: int, replicas: int, batch: int) -> dict[str, np.ndarray]:
    """Of every `batch` rows those of one replica, so that the replicas' batches together are the whole one."""
    size = batch // replicas
    return {
        name: array.reshape(-1, replicas, size, *array.shape[1:])[:, replica].reshape(-1, *array.shape[1:])
        for name, array in data.items()
    }


def differences(actual: Result, expected: Result) -> tuple[float, float]:
    """The largest relative difference of a loss, and the largest of a weight relative to its largest element."""
    assert len(actual.losses) == len(expected.losses) > 0
    loss = max(abs(a - e) / abs(e) for a, e in zip(actual.losses, expected.losses, strict=True))
    assert actual.tensors.keys() == expected.tensors.keys()
    weight = 0.0
    for name, tensor in expected.tensors.items():
        if name.startswith(("weights/", "states/")):
            scale = max(float(tensor.abs().max()), 1e-3)
            weight = max(weight, float((actual.tensors[name] - tensor).abs().max()) / scale)
    return loss, weight


# ----------------------------------------------------------------------------------------------------- the models


def random(shape: tuple[int, ...], below: int | None = None, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    if below is None:
        return generator.random(shape, dtype=np.float32)
    return generator.integers(0, below, shape)


def _shaken(name: str, **options: Any) -> ir.Model:
    model = create_model(name, **options)
    replace_weights(model, shake(initial_weights(model)))
    return model


TOKENS, WORDS = 12, 64


def gpt2() -> ir.Model:
    """Four heads, two layers, the output layer tied to the embedding."""
    return _shaken(
        "gpt2", size="tiny", layers=2, width=32, heads=4, vocab_size=WORDS, context_length=TOKENS, dropout=0.0
    )


def tokens(samples: int) -> dict[str, np.ndarray]:
    labels = random((samples, TOKENS), WORDS, seed=1)
    # Samples count unequal numbers of labels.
    labels[random((samples, TOKENS), 10, seed=2) < np.arange(samples)[:, None] % 8] = -100
    return {"input_ids": random((samples, TOKENS), WORDS), "labels": labels}


def bert() -> ir.Model:
    return _shaken(
        "bert", size="tiny", layers=2, width=32, heads=4, vocab_size=WORDS, context_length=TOKENS, dropout=0.0
    )


def sentences(samples: int) -> dict[str, np.ndarray]:
    ids = random((samples, 3), WORDS - 1, seed=2) + 1
    ids[random((samples, 3), 2, seed=6) == 0] = 0
    return {
        "input1": random((samples, TOKENS), WORDS),
        "input2": random((samples, TOKENS), 2, seed=1),
        "input3": (np.arange(TOKENS)[None] < random((samples, 1), 4, seed=3) + 9).astype(np.int64),
        "masked_lm_positions": random((samples, 3), 9, seed=4),
        "masked_lm_ids": ids,
        "next_sentence_labels": random((samples,), 2, seed=5),
    }


def squeezenet() -> ir.Model:
    model = create_model("squeezenet", image_size=32, channels=1, classes=10, dropout=0.0)
    replace_weights(model, initial_weights(model))
    return model


def squeezenet_images(samples: int) -> dict[str, np.ndarray]:
    return {"data": random((samples, 1, 32, 32)), "labels": random((samples,), 10, seed=1)}


CROSS_ENTROPY = {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"}
CASES = {
    "gpt2": Case(gpt2, {**CROSS_ENTROPY, "ignore_index": -100}, tokens),
    "bert": Case(bert, {"type": "bert"}, sentences),
}
