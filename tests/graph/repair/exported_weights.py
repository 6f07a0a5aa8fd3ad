"""Exports of torch modules by both exporters, and their weights compared with the parameters."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

from onward.graph.training_graph import TrainingGraph

BOTH = pytest.mark.parametrize(("dynamo", "opset"), [(True, 18), (False, 17)], ids=["new", "old"])


def values(graph: TrainingGraph) -> dict[str, np.ndarray]:
    found = {}
    for name in graph.weights:
        tensor = graph.model.graph.initializers[name].const_value
        assert tensor is not None
        found[name] = tensor.numpy()
    return found


def match(graph: TrainingGraph, module: nn.Module) -> tuple[list[str], list[str]]:
    """Parameters without a weight, weights without a parameter: by name, else by equal numbers, transposed or not."""
    weights = values(graph)
    missing = []
    parameters = {name: p.detach().numpy() for name, p in module.named_parameters()}
    for name in [name for name in parameters if name in weights]:
        np.testing.assert_array_equal(weights.pop(name), parameters.pop(name))
    for name, array in parameters.items():
        equal = [w for w, other in weights.items() if np.array_equal(other, array) or np.array_equal(other, array.T)]
        if equal:
            weights.pop(equal[0])
        else:
            missing.append(name)
    return missing, list(weights)
