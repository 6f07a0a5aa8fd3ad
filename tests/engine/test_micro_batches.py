"""Micro-batches one by one and through a pipeline: what is computed when, and what is passed on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from onward.data.batches import START, Batch
from onward.engine.gradient_reduction import GradientReduction
from onward.engine.inputs.features import FeatureReader
from onward.engine.inputs.loss_normalization import LossNormalization
from onward.engine.micro_batches import SHARES, PipelinedMicroBatches, SequentialMicroBatches, shared_loss
from onward.engine.network.forward import Forward
from onward.engine.network.network import unsplit_network
from onward.engine.network.precision import Precision
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.lowering.module import OnnxModule
from onward.parallel.launch.process import in_world_of_one
from onward.parameters import Loss, Training
from onward.parameters.distributed import Distributed
from tests.mlp import CROSS_ENTROPY, build_mlp, cross_entropies, data, forward, weights

GRAPH = make_training_graph(build_mlp(), loss=LossSpec(**CROSS_ENTROPY))


def batches(count: int) -> list[Batch]:
    features = data(4 * count)
    return [
        Batch(
            features={name: features[name][4 * i : 4 * i + 4] for name in ("x", "label")},
            cursor=4,
            sample_count=0,
            epoch=START,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_one_by_one_adds_up_gradients_of_scaled_losses(scale: float) -> None:
    mesh = in_world_of_one()
    network = unsplit_network(OnnxModule(GRAPH))
    assert GRAPH.loss_names is not None
    loss = GRAPH.loss_names.loss
    shares = LossNormalization(mesh, Loss(**CROSS_ENTROPY), GRAPH.loss_names, Training(batch_size=4), True)
    steps = SequentialMicroBatches(
        Forward(network, (loss,), Precision(None)), shares, GradientReduction(mesh=mesh, distributed=Distributed())
    )
    gradient = torch.zeros(4)
    for number, batch in enumerate(batches(2)):
        computed = steps.add(batch, number == 1, scale)
        features = {name: np.asarray(value) for name, value in batch.features.items()}
        logits = forward(features["x"], weights())
        expected = cross_entropies(logits, features["label"]).mean()
        assert computed is not None
        assert computed.losses == 1
        assert float(computed.loss_sum) == pytest.approx(expected, rel=1e-6)
        assert not computed.loss_sum.requires_grad
        probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        gradient += torch.from_numpy((probabilities - np.eye(4)[features["label"]]).mean(axis=0)).float()
    bias = network.weights["b2"].grad
    assert bias is not None
    torch.testing.assert_close(bias, scale * gradient, rtol=1e-5, atol=1e-6)


class RecordingPipeline:
    """Writes down what it is given, and says that the losses are 1, 2, 3, ..."""

    def __init__(self) -> None:
        self.given: list[tuple[Sequence[Mapping[str, torch.Tensor]], list[float]]] = []

    def run(self, features: Sequence[Mapping[str, torch.Tensor]], factors: torch.Tensor) -> torch.Tensor:
        self.given.append((features, factors.tolist()))
        return torch.arange(1.0, len(features) + 1)


def through(pipeline: RecordingPipeline, share: float | None) -> PipelinedMicroBatches:
    reader = FeatureReader(GRAPH, ("x", "label"), torch.device("cpu"))
    factors = None if share is None else torch.tensor([share])
    shares: Any = SimpleNamespace(of=lambda batches: [factors] * len(batches))
    return PipelinedMicroBatches(pipeline, reader, shares)  # type: ignore[arg-type]


def test_a_pipeline_gets_all_micro_batches_of_an_update_at_once() -> None:
    pipeline = RecordingPipeline()
    steps = through(pipeline, None)
    for _ in range(2):
        *others, last = batches(3)
        assert [steps.add(batch, False, 4.0) for batch in others] == [None, None]
        computed = steps.add(last, True, 4.0)
        assert computed is not None
        assert (float(computed.loss_sum), computed.losses, computed.outputs) == (6.0, 3, {})
    assert [factors for _, factors in pipeline.given] == [[4.0] * 3] * 2
    features, _ = pipeline.given[1]
    for found, batch in zip(features, batches(3), strict=True):
        assert set(found) == {"x", "label"}
        np.testing.assert_array_equal(found["x"].numpy(), batch.features["x"])


def test_the_share_of_a_replicas_loss_travels_with_its_features() -> None:
    pipeline = RecordingPipeline()
    through(pipeline, 0.25).add(batches(1)[0], True, 1.0)
    assert pipeline.given[0][0][0][SHARES].tolist() == [0.25]


def test_losses_in_16_bits_are_summed_in_32() -> None:
    """60,000 twice is above what fp16 holds."""
    half = torch.tensor(6e4, dtype=torch.float16)
    total = shared_loss({"a": half, "b": half}, ("a", "b"), None)
    assert (total.dtype, float(total)) == (torch.float32, 2 * float(half))
