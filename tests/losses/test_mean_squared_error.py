"""The mean squared error is torch's, with its gradient, where numbers are large and where they are equal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch.nn.functional as F

from onward.graph.losses.spec import LossSpec
from tests.losses.formulas import check

pytestmark = pytest.mark.filterwarnings("ignore:The model has no trainable weights")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("opset", [7, 23])
def test_mean_squared_error(opset: int, reduction: str, tmp_path: Path) -> None:
    prediction = np.array([[0.0, 1.0], [-3e4, 2.5], [1e-3, 7.0]], np.float32)
    labels = np.array([[0.0, 1.5], [3e4, 2.5], [0.0, -7.0]], np.float32)
    spec = LossSpec(type="mean_squared_error", prediction="y", label="t", reduction=reduction)
    counts = check(
        spec, ["batch", 2], opset, prediction, labels, lambda y, t: F.mse_loss(y, t, reduction=reduction), tmp_path
    )
    assert counts == {}  # nothing is right or wrong
