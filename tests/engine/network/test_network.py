"""A network in segments computes what the entire program does, and holds every weight once, where it is read."""

from __future__ import annotations

import pytest
import torch

from onward.engine.network.forward import Forward
from onward.engine.network.network import Network, Segment, unsplit_network
from onward.engine.network.precision import Precision
from onward.lowering.module import OnnxModule
from onward.parameters.distributed import Recompute
from onward.plan.costs.segments import plan_segments
from tests.plan.staged_models import batch_of, graph_of

MODELS = ["mlp", "gpt2", "bert", "squeezenet", "u_net", "awkward"]


def in_segments(name: str, recompute: bool = False) -> Network:
    graph = graph_of(name)
    plan = plan_segments(graph.model.graph, graph.weights, True, Recompute(segments=recompute))
    return Network(OnnxModule(graph), plan)


def gradients(network: Network, name: str) -> dict[str, torch.Tensor]:
    network.train()
    network.net.train()
    loss = str(network.net.graph.loss)
    value = Forward(network, (loss,), Precision(None))(batch_of(name, 0))[loss]
    value.backward()
    found = {key: weight.grad for key, weight in network.weights.items() if weight.grad is not None}
    return {"loss": value.detach(), **found}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_segments_compute_what_the_whole_does(name: str, recompute: bool) -> None:
    expected = gradients(unsplit_network(OnnxModule(graph_of(name))), name)
    network = in_segments(name, recompute)
    actual = gradients(network, name)
    assert actual.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(actual[key], gradient, rtol=1e-6, atol=1e-7)
    assert len(network.segments) > 1 or name == "awkward"


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_has_one_home(name: str) -> None:
    network = in_segments(name)
    homes = [*network.segments, network.shared]
    held = [key for home in homes if isinstance(home, Segment) for key in home.weight_names]
    assert sorted(held) == sorted(network.net.graph.weights)
    assert {id(weight) for weight in network.parameters()} == {id(weight) for weight in network.weights.values()}


def test_a_tied_weight_is_shared_by_its_segments() -> None:
    network = in_segments("gpt2")
    assert "wte.weight" in network.shared.weight_names
    assert not any("wte.weight" in segment.weight_names for segment in network.segments)  # type: ignore[operator]
