"""Merged weights, element by element, and what a merge leaves alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import onward
from tests.graph.adapters.nets import adapted, move
from tests.graph.adapters.readings import READINGS
from tests.initializers import stored_arrays


@pytest.mark.parametrize("name", READINGS)
def test_what_is_added_to_the_weight_is_the_scaled_product(name: str, tmp_path: Path):
    case = READINGS[name]
    net = adapted(case.model())
    move(net)
    onward.export(net, tmp_path / "merged.onnx")
    before, after = (stored_arrays(one) for one in (case.model(), onnx.load(tmp_path / "merged.onnx")))
    a, b = (net.weights[f"w.lora_{letter}"].detach().numpy() for letter in "AB")
    assert np.abs(after["w"] - before["w"] - 1.5 * case.delta(a, b)).max() < 1e-6
    assert list(after) == list(before)
    assert all(np.array_equal(after[other], before[other]) for other in before if other != "w")
