"""Losses whose mean, or whose other samples, span replicas: every layout trains like one process."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from tests.invariants.cases import CASES as SHARED_CASES
from tests.invariants.cases import IGNORING, Case, random
from tests.invariants.layouts import Layout, assert_follows, train
from tests.invariants.rank_pool import end_ranks
from tests.losses.test_dpo import LOSS, model, other_model, pairs
from tests.plan.staged_models import Sketch, mlp

OF_LOSSES, OF_WEIGHTS = 1e-6, 5e-6


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    yield
    end_ranks()


def towers() -> ir.Model:
    """Two inputs, an embedding of each, and a learned scale: what CLIP is made of."""
    sketch, ends = Sketch(seed=3), []
    for name in ("image", "text"):
        value = sketch.input(name, ["batch", 8])
        for layer in range(2):
            weight = sketch.weight(f"{name}{layer}.weight", 8, 8)
            value = sketch.node("MatMul", f"{name}{layer}", value, weight)
            value = sketch.node("Tanh", f"{name}{layer}_bent", value) if layer == 0 else value
        ends.append(value)
    scale = sketch.node("Exp", "scale", sketch.weight("logit_scale", array=np.array([1.0], np.float32)))
    return sketch.model(*ends, scale)


def images_and_texts(samples: int) -> dict[str, np.ndarray]:
    image = random((samples, 8))
    return {"image": image, "text": image[:, ::-1] + random((samples, 8), seed=1) / 4}


def rows_of_pixels() -> ir.Model:
    """Five classes at each of six places."""
    sketch = Sketch(seed=4)
    value = sketch.input("x", ["batch", 6, 8])
    for layer in range(3):
        value = sketch.node("MatMul", f"fc{layer}", value, sketch.weight(f"fc{layer}.weight", 8, 8))
        value = sketch.node("Tanh", f"bent{layer}", value)
    return sketch.model(sketch.node("MatMul", "logits", value, sketch.weight("last.weight", 8, 5)))


def pixels(samples: int) -> dict[str, np.ndarray]:
    """Samples count unequal numbers of labels: of eight in a row the first two five of six, the last two two."""
    labels = random((samples, 6), 5, seed=1)
    labels[np.arange(6)[None] < np.arange(samples)[:, None] % 8 // 2 + 1] = -100
    return {"x": random((samples, 6, 8)), "labels": labels}


def zeros_and_ones(samples: int) -> dict[str, np.ndarray]:
    x = random((samples, 8))
    return {"x": x, "labels": (np.roll(x, 1, axis=1) > 0.6).astype(np.float32)}


ELEMENTS = {"prediction": "logits", "label": "labels", "from_logits": True}
CONTRASTIVE = {"type": "info_nce", "prediction": "image1", "paired_prediction": "text1"}
CASES = {
    "label smoothing": Case(rows_of_pixels, {**IGNORING, "label_smoothing": 0.1}, pixels),
    "focal": Case(mlp, {"type": "focal", **ELEMENTS}, zeros_and_ones),
    "focal of classes": Case(rows_of_pixels, {**IGNORING, "type": "softmax_focal"}, pixels),
    "dice": Case(rows_of_pixels, {**IGNORING, "type": "dice"}, pixels),
    "binary dice": Case(mlp, {"type": "binary_dice", **ELEMENTS}, zeros_and_ones),
    "preferences": Case(model, LOSS, pairs),
    "contrastive": Case(towers, CONTRASTIVE, images_and_texts, {"weights_not_to_train": ["logit_scale"]}),
    "contrastive with a scale": Case(
        towers, {**CONTRASTIVE, "logit_scale": "scale"}, images_and_texts, {"weights_to_train": ["*"]}
    ),
}


QUICK = {
    "2x1x1": ("label smoothing", "focal of classes", "dice", "preferences", "contrastive"),
    "1x2x1": ("label smoothing",),
    "1x1x2": ("contrastive with a scale",),
}
RUNS = [
    pytest.param(name, layout, marks=() if name in QUICK[str(layout)] else pytest.mark.slow)
    for layout in (Layout(2, 1, 1), Layout(1, 2, 1), Layout(1, 1, 2))
    for name in CASES
]


@pytest.mark.parametrize(("name", "layout"), RUNS, ids=str)
def test_every_layout_follows_one_process(name: str, layout: Layout) -> None:
    """Replicas of a contrastive loss have the embeddings of all replicas to compare with."""
    actual, expected = (
        train(CASES[name], one, updates=3, accumulation=2, test_samples=7) for one in (layout, Layout())
    )
    assert_follows(actual, expected, OF_LOSSES, OF_WEIGHTS)


def test_every_layout_follows_one_process_with_another_reference(tmp_path: Path) -> None:
    ir.save(other_model(), tmp_path / "reference.onnx")
    case = Case(model, {**LOSS, "reference_model_path": str(tmp_path / "reference.onnx")}, pairs)
    expected, *others = (
        train(case, one, updates=2, accumulation=2, test_samples=3)
        for one in (Layout(), Layout(2, 1, 1, {"zero_stage": 3}), Layout(1, 2, 1), Layout(1, 1, 2))
    )
    for actual in others:
        assert_follows(actual, expected, OF_LOSSES, OF_WEIGHTS)


@pytest.mark.parametrize("name", ["contrastive", "label smoothing"])
def test_replicas_of_unequal_batches(name: str) -> None:
    """Replicas of 12 and 11 samples, whose third batches have 4 and 3: one process has both in one batch."""
    case = CASES[name]
    data = case.data(23)
    order = [*range(4), *range(12, 16), *range(4, 8), *range(16, 20), *range(8, 12), *range(20, 23)]
    together = Case(case.model, case.loss, lambda _: {key: rows[order] for key, rows in data.items()}, case.training)
    options = {"updates": 3, "last_batch": "short", "samples": 23, "sections": {"data": {"last_batch": "short"}}}
    actual, expected = train(case, Layout(2, 1, 1), **options), train(together, Layout(), **options)
    assert_follows(actual, expected, OF_LOSSES, OF_WEIGHTS)


def test_negatives_are_of_all_replicas() -> None:
    """Compared with their own samples alone, replicas would report another loss."""
    case = CASES["contrastive"]
    whole, half = (train(case, Layout(), global_batch=size, updates=1).losses[0] for size in (8, 4))
    assert train(case, Layout(2, 1, 1), global_batch=8, updates=1).losses[0] == pytest.approx(whole, rel=1e-6)
    assert abs(whole - half) > 0.1


def half_without_labels(samples: int) -> dict[str, np.ndarray]:
    data = pixels(samples)
    data["labels"][np.arange(samples) % 8 > 3] = -100
    return data


UNEQUAL = {
    **CASES,
    "no label in a micro-batch": Case(rows_of_pixels, IGNORING, half_without_labels),
    "masked words": SHARED_CASES["bert"],
    "sums": Case(mlp, {**SHARED_CASES["mlp"].loss, "reduction": "sum"}, SHARED_CASES["mlp"].data),
}
ACCUMULATED = [
    *((name, Layout(), "wrap") for name in ("focal", "dice", "binary dice", "label smoothing", "masked words", "sums")),
    ("label smoothing", Layout(), "short"),
    ("no label in a micro-batch", Layout(), "wrap"),
    ("label smoothing", Layout(2, 1, 1, {"zero_stage": 2}), "wrap"),
    ("sums", Layout(2, 1, 1), "wrap"),
    ("masked words", Layout(1, 2, 1), "wrap"),
    ("masked words", Layout(1, 1, 2), "wrap"),
]


@pytest.mark.parametrize(("name", "layout", "last_batch"), ACCUMULATED, ids=str)
def test_accumulated_micro_batches_are_one_batch(name: str, layout: Layout, last_batch: str) -> None:
    """Of unequal numbers of labels, or of samples: the last of an epoch has three."""
    options: dict[str, Any] = {"updates": 2, "last_batch": last_batch, "sections": {"data": {"last_batch": last_batch}}}
    options |= {"samples": 7} if last_batch == "short" else {}
    actual = train(UNEQUAL[name], layout, global_batch=4, accumulation=2, **options)
    assert_follows(actual, train(UNEQUAL[name], Layout(), global_batch=8, **options), OF_LOSSES, OF_WEIGHTS)


def test_accumulated_means_count_the_same() -> None:
    """On request: the mean of the updates that each micro-batch would make alone."""
    case = CASES["label smoothing"]
    sgd = {"training_optimizer_name": "SGDOptimizer", "optimizer_attributes": []}

    def rows(first: int, count: int) -> dict[str, np.ndarray]:
        return {name: one[first : first + count] for name, one in case.data(8).items()}

    def trained(first: int, steps: int, accumulate_as: str) -> dict[str, torch.Tensor]:
        own = Case(case.model, case.loss, functools.partial(rows, first), {"accumulate_as": accumulate_as})
        sections = {"optimizer": sgd, "learning_rate": {"initial_lr": 1.0}}
        found = train(own, Layout(), global_batch=4, updates=1, accumulation=steps, sections=sections).tensors
        return {name: one for name, one in found.items() if name.startswith("weights/")}

    asked, default = trained(0, 2, "mean"), trained(0, 2, "one_batch")
    first, second = trained(0, 1, "mean"), trained(4, 1, "mean")
    for name, one in asked.items():
        torch.testing.assert_close(one, (first[name] + second[name]) / 2, rtol=0, atol=1e-6)
    assert max(float((one - default[name]).abs().max()) for name, one in asked.items()) > 1e-3
