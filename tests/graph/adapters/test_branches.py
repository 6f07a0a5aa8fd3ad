"""Adapters of weights in every operator: the graph computes what ONNX Runtime computes with the merged weight."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import onward
from tests.graph.adapters.nets import adapted, computed, move, runtime
from tests.graph.adapters.readings import KINDS, READINGS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READINGS)
def test_an_adapter_is_what_the_merged_weight_computes(name: str, kind: str, tmp_path: Path):
    case = READINGS[name]
    model = case.model()
    onnx.save(model, tmp_path / "base.onnx")
    net, base = adapted(model, **KINDS[kind]), runtime(tmp_path / "base.onnx", case.inputs)
    assert np.abs(computed(net, case.inputs).detach().numpy() - base).max() < 2e-6
    move(net)
    expected = computed(net, case.inputs)
    assert np.abs(expected.detach().numpy() - base).max() > 1e-3
    onward.export(net, tmp_path / "merged.onnx")
    merged = runtime(tmp_path / "merged.onnx", case.inputs)
    assert np.abs(merged - expected.detach().numpy()).max() < 1e-5
    expected.square().sum().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in net.weights.values())


@pytest.mark.parametrize("name", ["Einsum of experts", "Einsum from the left, turned"])
def test_an_einsum_that_multiplies_matrices_gets_a_branch(name: str):
    """Nothing as large as the weight is computed; along a stack, or of norms, the sum of weight and product is."""
    branch, total = adapted(READINGS[name].model()), adapted(READINGS["Einsum along a stack"].model())
    for net, count in ((branch, 3), (total, 1), (adapted(READINGS[name].model(), dora=True), 1)):
        assert sum(node.op_type == "Einsum" for node in net.graph.model.graph) == count
