"""Label smoothing is torch's, with ignored labels, class weights and dense labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from onward.graph.losses.spec import LossSpec
from tests.losses.formulas import check

pytestmark = pytest.mark.filterwarnings("ignore:The model has no trainable weights")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("ignored", "weighted"), [(None, False), (-100, False), (2, True), (None, True)])
@pytest.mark.parametrize("opset", [7, 12, 13, 23])
def test_label_smoothing_is_torchs(
    opset: int, ignored: int | None, weighted: bool, reduction: str, tmp_path: Path
) -> None:
    """Classes on axis 1 of three; ignored labels and class weights take part as in torch."""
    generator = np.random.default_rng(1)
    prediction = generator.normal(size=(3, 7, 5), scale=2).astype(np.float32)
    labels = generator.integers(0, 7, (3, 5))
    if ignored is not None:
        labels[0, :3] = ignored
    weights = tuple(generator.uniform(0.2, 2, 7).tolist()) if weighted else None
    spec = LossSpec(
        type="softmax_cross_entropy", prediction="y", label="t", class_axis=1, label_smoothing=0.15,
        ignore_index=ignored, class_weights=weights, reduction=reduction,
    )  # fmt: skip

    def reference(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(
            y, t, weight=None if weights is None else torch.tensor(weights, dtype=y.dtype), reduction=reduction,
            ignore_index=-100 if ignored is None else ignored, label_smoothing=0.15,
        )  # fmt: skip

    check(spec, ["batch", 7, 5], opset, prediction, labels, reference, tmp_path)


@pytest.mark.parametrize("opset", [7, 23])
def test_dense_labels_are_smoothed_as_in_torch(opset: int, tmp_path: Path) -> None:
    generator = np.random.default_rng(2)
    prediction = generator.normal(size=(4, 6)).astype(np.float32)
    labels = generator.dirichlet(np.ones(6), 4).astype(np.float32)
    spec = LossSpec(type="softmax_cross_entropy", prediction="y", label="t", dense_labels=True, label_smoothing=0.3)

    def reference(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(y, t.double(), label_smoothing=0.3)

    check(spec, ["batch", 6], opset, prediction, labels, reference, tmp_path)


def test_smoothing_without_a_known_number_of_classes(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    prediction, labels = generator.normal(size=(4, 6)).astype(np.float32), generator.integers(0, 6, 4)
    spec = LossSpec(type="softmax_cross_entropy", prediction="y", label="t", label_smoothing=0.1)
    check(
        spec, ["batch", "classes"], 18, prediction, labels,
        lambda y, t: F.cross_entropy(y, t, label_smoothing=0.1), tmp_path,
    )  # fmt: skip
