"""What every rank's share of the data weighs: losses by labels, batches of unequal size, evaluation, Adasum."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onward.checkpoint.reading import checkpoint_number, list_checkpoints
from tests.invariants.cases import CASES, CROSS_ENTROPY, IGNORING, Case, gpt2, mlp, points, tokens
from tests.invariants.layouts import Layout, assert_follows, assert_moves, differences, train, train_on_ranks
from tests.invariants.rank_pool import end_ranks

OF_LOSSES, OF_WEIGHTS = 1e-6, 5e-6
SMALL_STEPS = {
    "learning_rate": {"initial_lr": 1e-4},
    "optimizer": {"training_optimizer_name": "SGDOptimizer", "optimizer_attributes": []},
}
LAYOUTS = [
    Layout(2, 1, 1),
    Layout(2, 1, 1, {"zero_stage": 3}),
    pytest.param(Layout(2, 1, 2, {"zero_stage": 1}), marks=pytest.mark.slow),
    pytest.param(Layout(2, 2, 1), marks=pytest.mark.slow),
    pytest.param(Layout(2, 1, 1, {"context_parallel_size": 2}), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    yield
    end_ranks()


def tokens_of_one_replica(samples: int) -> dict[str, np.ndarray]:
    """The second half of every eight samples counts no label at all."""
    data = tokens(samples)
    data["labels"].reshape(-1, 8, 12)[:, 4:] = -100
    return data


LOSSES: dict[str, Mapping[str, Any]] = {
    "labels of one replica only": IGNORING,
    "class weights": {**IGNORING, "class_weights": [0.1 + index / 32 for index in range(64)]},
    "sum": {**IGNORING, "reduction": "sum"},
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_loss_of_the_union(loss: str, layout: Layout) -> None:
    case = Case(gpt2, LOSSES[loss], tokens_of_one_replica if "one replica" in loss else tokens)
    sections = SMALL_STEPS if loss == "sum" else None
    actual, expected = (train(case, one, accumulation=2, sections=sections) for one in (layout, Layout()))
    assert_follows(actual, expected, OF_LOSSES, OF_WEIGHTS)


@pytest.mark.parametrize("layout", [*LAYOUTS[:2], LAYOUTS[3]], ids=str)
def test_short_last_batches(layout: Layout) -> None:
    """Each of two replicas has 11 samples and batches of 4, 4, 3; one process has them all in batches of 8, 8, 6."""
    case = CASES["gpt2"]
    data = case.data(22)
    order = [*range(4), *range(11, 15), *range(4, 8), *range(15, 19), *range(8, 11), *range(19, 22)]
    together = dataclasses.replace(case, data=lambda _: {name: array[order] for name, array in data.items()})
    options = {"updates": 6, "last_batch": "short", "samples": 22, "sections": {"data": {"last_batch": "short"}}}
    assert_follows(train(case, layout, **options), train(together, Layout(), **options), OF_LOSSES, OF_WEIGHTS)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_replicas_whose_short_batches_differ(reduction: str) -> None:
    """Replicas of 12 and 11 samples: the third batch has 4 samples here and 3 there; each sample weighs the same."""
    case = Case(mlp, {**CROSS_ENTROPY, "reduction": reduction}, points)
    data = points(23)
    order = [*range(4), *range(12, 16), *range(4, 8), *range(16, 20), *range(8, 12), *range(20, 23)]
    together = dataclasses.replace(case, data=lambda _: {name: array[order] for name, array in data.items()})
    options = {"updates": 3, "last_batch": "short", "samples": 23, "sections": {"data": {"last_batch": "short"}}}
    actual, expected = train(case, Layout(2, 1, 1), **options), train(together, Layout(), **options)
    assert_follows(actual, expected, OF_LOSSES, OF_WEIGHTS)


@pytest.mark.parametrize("test_data", ["replicated", "partitioned"])
@pytest.mark.parametrize("layout", [*LAYOUTS, Layout(1, 2, 1), Layout(1, 1, 2)], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_evaluation(name: str, layout: Layout, test_data: str) -> None:
    """Eleven samples in batches of three; of two replicas one has six of them, the other five."""
    if layout.data == 1 and test_data == "partitioned":
        pytest.skip("one replica has the whole test set")
    options: dict[str, Any] = {"updates": 2, "accumulation": 2, "test_samples": 11}
    options["sections"] = {"training": {"evaluation_period": 4}, "data": {"test_data": test_data}}
    actual, expected = train(CASES[name], layout, **options), train(CASES[name], Layout(), **options)
    assert len(actual.metrics) == len(expected.metrics) == 1
    assert actual.metrics[0].keys() == expected.metrics[0].keys() >= {"loss", "accuracy"}
    assert actual.metrics[0] == pytest.approx(expected.metrics[0], rel=1e-6)


OF_CLASSES = ["auroc", {"name": "f1", "average": "macro"}]


@pytest.mark.parametrize(
    ("metrics", "layout", "test_data"),
    [
        (OF_CLASSES, Layout(2, 1, 1), "replicated"),
        (OF_CLASSES, Layout(2, 1, 1, {"zero_stage": 3}), "partitioned"),
        (["perplexity"], Layout(2, 1, 1), "partitioned"),
        (["perplexity"], Layout(1, 2, 1), "replicated"),
        (["perplexity"], Layout(1, 1, 2), "replicated"),
        pytest.param(OF_CLASSES, Layout(2, 1, 2), "partitioned", marks=pytest.mark.slow),
        pytest.param(["perplexity"], Layout(2, 2, 1), "partitioned", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_metrics_by_name(metrics: list[Any], layout: Layout, test_data: str) -> None:
    """Metrics that are no means of batches: every rank has those of the entire test set."""
    pytest.importorskip("torchmetrics", reason="torchmetrics (onward[metrics]) computes metrics by name")
    case = CASES["gpt2"] if metrics == ["perplexity"] else Case(mlp, CROSS_ENTROPY, points)
    options: dict[str, Any] = {"updates": 2, "accumulation": 2, "test_samples": 11}
    training = {"evaluation_period": 4, "metrics": metrics}
    options["sections"] = {"training": training, "data": {"test_data": test_data}}
    actual, expected = train(case, layout, **options), train(case, Layout(), **options)
    names = [one if isinstance(one, str) else one["name"] for one in metrics]
    assert set(actual.metrics[0]) == {"loss", "accuracy", *names}
    assert actual.metrics[0] == pytest.approx(expected.metrics[0], rel=2e-6)
    if metrics == ["perplexity"]:
        assert actual.metrics[0]["perplexity"] == pytest.approx(np.exp(actual.metrics[0]["loss"]), rel=1e-5)


@pytest.mark.parametrize(
    "layout",
    [Layout(2, 1, 1), Layout(2, 1, 1, {"zero_stage": 3}), pytest.param(Layout(1, 1, 2), marks=pytest.mark.slow)],
    ids=str,
)
def test_early_stopping(layout: Layout) -> None:
    """Every rank stops after the same update, the one after which one process does; the best checkpoint is kept."""
    case = CASES["gpt2"]
    found = []
    for one in (layout, Layout()):
        with tempfile.TemporaryDirectory() as folder:
            sections = {
                "training": {"evaluation_period": 2},
                "early_stopping": {"metric": "accuracy", "patience": 2},
                "data": {"test_data": "partitioned"},
                "checkpoint": {"checkpoints_dir": f"{folder}/checkpoints", "keep_best": True},
            }
            options: dict[str, Any] = {"updates": 12, "accumulation": 2, "test_samples": 11, "folder": folder}
            result = train(case, one, sections=sections, **options)
            kept = sorted(checkpoint_number(path) for path in list_checkpoints(Path(folder) / "checkpoints"))
            found.append((len(result.losses), kept, [metrics["accuracy"] for metrics in result.metrics]))
    assert found[0] == found[1]
    updates, kept, accuracies = found[0]
    assert updates < 12
    assert kept == sorted({1 + int(np.argmax(accuracies[:updates])), updates})


def adasum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Maleki et al. 2021, equation 3, of two gradients of a tensor."""
    product = float((a * b).sum())
    return (1 - product / (2 * (a * a).sum())) * a + (1 - product / (2 * (b * b).sum())) * b


@pytest.mark.parametrize("layout", [Layout(2, 1, 1), pytest.param(Layout(4, 1, 1), marks=pytest.mark.slow)], ids=str)
def test_adasum_of_a_run(layout: Layout) -> None:
    """One update of plain SGD takes the Adasum of the replicas' own gradients, tensor by tensor, pairs of pairs."""
    case = Case(mlp, CROSS_ENTROPY, points)
    rate = 0.5
    sections = {"optimizer": {"training_optimizer_name": "SGDOptimizer", "optimizer_attributes": []}}
    options: dict[str, Any] = {"updates": 1, "sections": {**sections, "learning_rate": {"initial_lr": rate}}}
    spread = dataclasses.replace(layout, distributed={"enable_adasum": True})
    actual = train(case, spread, **options)
    rows = 8 // layout.data
    before = {f"weights/{v.name}": v.const_value.numpy() for v in mlp().graph.initializers.values()}  # type: ignore[union-attr]
    gradients = []
    for replica in range(layout.data):
        part = {name: array[replica * rows : (replica + 1) * rows] for name, array in points(8).items()}
        own = dataclasses.replace(case, data=lambda _, part=part: part)
        after = train(own, Layout(), global_batch=rows, **options).tensors
        gradients.append({name: (before[name] - after[name].numpy()).astype(np.float64) / rate for name in before})
    for name, tensor in before.items():
        level = [gradient[name] for gradient in gradients]
        while len(level) > 1:
            level = [adasum(level[index], level[index + 1]) for index in range(0, len(level), 2)]
        expected = torch.from_numpy(tensor - rate * level[0]).float()
        torch.testing.assert_close(actual.tensors[name], expected, rtol=1e-5, atol=1e-6)
    mean = train(case, layout, **options)
    assert differences(actual, mean)[1] > 1e-2


@pytest.mark.parametrize(
    "layout",
    [Layout(2, 1, 1), *(pytest.param(one, marks=pytest.mark.slow) for one in (Layout(2, 2, 1), Layout(3, 1, 1)))],
    ids=str,
)
def test_adasum_leaves_equal_weights_on_all_replicas(layout: Layout) -> None:
    spread = dataclasses.replace(layout, distributed={"enable_adasum": True})
    results = train_on_ranks(CASES["gpt2"], spread, accumulation=2, global_batch=12, updates=4)
    assert_moves(results[0])
    for rank, result in enumerate(results):
        twin = results[rank % layout.horizontal]
        assert all(torch.equal(tensor, twin.own[name]) for name, tensor in result.own.items())
