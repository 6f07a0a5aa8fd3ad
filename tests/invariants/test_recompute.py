"""Recompute changes memory and nothing else: losses, weights and running statistics are those of a run without it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import onward.lowering.kernels.rematerialize as rematerialize
from onward.models import create_model
from tests.invariants.layouts import Case, Layout, differences, train

BOUND = 1e-6
ATTENTION_WRITTEN_OUT = {"fusions_off": ["attention"]}
WAYS: dict[str, dict[str, Any]] = {
    "segments": {"segments": True},
    "two segments": {"segments": True, "number_recompute_layers": 2},
    "attention": {"attention": True},
    "budget": {"memory_budget": 0.3},
}


def gpt2(dropout: float = 0.0) -> ir.Model:
    return create_model(
        "gpt2", size="tiny", layers=2, heads=2, width=16, vocab_size=32, context_length=8, dropout=dropout
    )


def gpt2_with_dropout() -> ir.Model:
    return gpt2(0.2)


def tokens(count: int) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(0).integers(0, 32, (count, 9))
    return {"input_ids": drawn[:, :-1], "labels": drawn[:, 1:].copy()}


def normalized() -> ir.Model:
    """Convolutions with batch normalization, whose running statistics a repeated pass must not move twice."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        *(
            module
            for _ in range(3)
            for module in (torch.nn.Conv2d(3, 3, 3, padding=1), torch.nn.BatchNorm2d(3), torch.nn.ReLU())
        ),
        torch.nn.Flatten(),
        torch.nn.Linear(108, 5),
    ).train()
    file = io.BytesIO()
    torch.onnx.export(
        network, (torch.zeros(2, 3, 6, 6),), file, dynamo=False, training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False, input_names=["x"], output_names=["logits"],
        dynamic_axes={"x": {0: "batch"}, "logits": {0: "batch"}},
    )  # fmt: skip
    return ir.serde.deserialize_model(onnx.load_from_string(file.getvalue()))


def images(count: int) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(0)
    return {
        "x": drawn.normal(size=(count, 3, 6, 6)).astype(np.float32),
        "labels": drawn.integers(0, 5, count),
    }


LOSS = {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"}
LANGUAGE = Case(gpt2, LOSS, tokens)
DROPOUT = Case(gpt2_with_dropout, LOSS, tokens)
NORMALIZED = Case(normalized, LOSS, images)


def both(case: Case, layout: Layout, recompute: Mapping[str, Any], **arguments: Any) -> tuple[float, float]:
    speed: dict[str, Any] = {"speed": ATTENTION_WRITTEN_OUT}
    plain = train(case, layout, updates=3, sections=speed, **arguments)
    saving = train(case, layout, updates=3, sections={**speed, "recompute": recompute}, **arguments)
    assert plain.losses[0] != plain.losses[-1]
    return differences(saving, plain)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", [LANGUAGE, DROPOUT], ids=["plain", "dropout"])
def test_one_process_trains_as_without(case: Case, way: str) -> None:
    assert max(both(case, Layout(), WAYS[way])) <= BOUND


@pytest.mark.parametrize("case", [LANGUAGE, DROPOUT], ids=["plain", "dropout"])
def test_cheap_activations_kept_or_recomputed_give_the_same_bits(case: Case) -> None:
    assert both(case, Layout(), {"cheap_activations": False}) == (0.0, 0.0)


def test_what_follows_a_batch_normalization_made_again_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[None] = []
    take = rematerialize.Rematerialization.take
    monkeypatch.setattr(rematerialize, "LEAST_BYTES", 0)
    monkeypatch.setattr(rematerialize.Rematerialization, "take", lambda self: made.append(None) or take(self))
    assert both(NORMALIZED, Layout(), {"cheap_activations": False}) == (0.0, 0.0)
    assert made


@pytest.mark.parametrize("way", ["segments", "budget"])
def test_running_statistics_move_once(way: str) -> None:
    assert max(both(NORMALIZED, Layout(), WAYS[way])) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize("way", ["segments", "attention", "budget"])
@pytest.mark.parametrize(
    ("layout", "accumulation"),
    [
        (Layout(data=2), 2),
        (Layout(data=2, distributed={"zero_stage": 3}), 1),
        (Layout(pipeline=2), 2),
        (Layout(horizontal=2), 1),
    ],
    ids=["replicas", "ZeRO 3", "pipeline", "horizontal"],
)
def test_several_processes_train_as_without(layout: Layout, accumulation: int, way: str) -> None:
    assert max(both(LANGUAGE, layout, WAYS[way], accumulation=accumulation)) <= BOUND


@pytest.mark.slow
def test_replicas_over_a_pipeline_train_as_without() -> None:
    layout = Layout(data=2, pipeline=2, distributed={"zero_stage": 2})
    assert max(both(LANGUAGE, layout, WAYS["segments"], accumulation=2)) <= BOUND
