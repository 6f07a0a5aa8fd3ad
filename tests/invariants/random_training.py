"""A drawn network trained with and without what makes training faster or smaller, and how far both are apart."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import onnx
import torch

import onward.graph.shared_inputs as shared_inputs
from onward.engine.network.forward import Forward
from onward.engine.network.network import LinearOptions, Network
from onward.engine.network.precision import Precision
from onward.graph.losses.spec import LossSpec
from onward.graph.training_graph import make_training_graph
from onward.lowering.context import ExecutionContext
from onward.lowering.module import OnnxModule
from onward.parameters.distributed import Recompute
from onward.plan.costs.segments import plan_segments


@dataclass(frozen=True)
class Speedups:
    """What is on: fusion, what is recomputed, joined layers, sparse lookups, channels-last images."""

    fuse: bool = True
    again: bool = True
    joins: bool = True
    sparse: bool = True
    channels_last: bool = True


ALL, NONE = Speedups(), Speedups(False, False, False, False, False)


@dataclass(frozen=True)
class Trained:
    """Losses of all steps; weights and running statistics by name."""

    losses: list[float]
    tensors: dict[str, torch.Tensor]


def modules_of(package: str) -> list[ModuleType]:
    """A package's modules, all imported."""
    folders = importlib.import_module(package).__path__
    names = [found.name for found in pkgutil.walk_packages(folders, f"{package}.")]
    return [importlib.import_module(name) for name in names if not name.endswith("__main__")]


@contextmanager
def of_any_size() -> Iterator[None]:
    """In here nothing is too small to be worth it."""
    thresholds = ("LEAST_", "SMALL_BYTES", "WORTHWHILE_")
    modules = modules_of("onward.lowering")
    places = [(module, name) for module in modules for name in vars(module) if name.startswith(thresholds)]
    places.append((shared_inputs, "LEAST_OUTPUTS"))
    before = [getattr(*place) for place in places]
    for place, value in zip(places, before, strict=True):
        setattr(*place, type(value)())
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            setattr(*place, value)


def train(
    model: onnx.ModelProto,
    data: Mapping[str, np.ndarray],
    how: Speedups,
    batch: int,
    accumulation: int = 1,
    rate: float = 0.05,
) -> Trained:
    """Three updates by SGD with momentum, of the weights whose names begin with `w`."""
    loss = LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels")
    graph = make_training_graph(model, loss=loss, fuse=how.fuse, weights_to_train=["w*"])
    assert graph.loss is not None
    net = OnnxModule(graph, (graph.loss,), context=ExecutionContext(channels_last_images=how.channels_last))
    plan = plan_segments(graph.model.graph, graph.weights, False, Recompute())
    network = Network(net, plan, None, LinearOptions(how.again, how.joins), how.sparse)
    network.train()
    forward = Forward(network, (graph.loss,), Precision(None))
    optimizer = torch.optim.SGD(network.weights.values(), lr=rate, momentum=0.9)
    losses: list[float] = []
    for step in range(3 * accumulation):
        rows = (np.arange(batch) + step * batch) % len(data["labels"])
        found = forward(forward.reader.to_tensors({name: array[rows] for name, array in data.items()}))[graph.loss]
        (found / accumulation).backward()
        losses.append(float(found.detach()))
        if (step + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    tensors = net.tensors_by_name()
    kept = {name: tensors[name].detach().clone() for name in graph.states}
    return Trained(losses, kept | {name: weight.detach().clone() for name, weight in network.weights.items()})


def distance(found: Trained, expected: Trained) -> float:
    """The largest difference of a loss, or of a tensor as a part of its largest element; infinite for NaN."""
    worst = [abs(one - other) / max(abs(other), 1e-6) for one, other in zip(found.losses, expected.losses, strict=True)]
    for name, tensor in expected.tensors.items():
        size = max(float(tensor.abs().max()), 1e-2)
        worst.append(float((found.tensors[name].double() - tensor.double()).abs().max()) / size)
    return max(value if value == value else float("inf") for value in worst)


def is_same(found: Trained, expected: Trained) -> bool:
    """Whether every bit is."""
    return found.losses == expected.losses and all(
        torch.equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items()
    )
