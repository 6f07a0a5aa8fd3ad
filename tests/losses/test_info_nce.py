"""The contrastive loss is CLIP's, of one process; tests/invariants/test_layouts_losses.py has replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from onward import to_torch
from onward.errors import ModelError
from onward.graph.losses.file import write_model_with_loss
from onward.graph.losses.spec import LossSpec
from tests.graph.loss_models import Shape, pass_through, run_loss
from tests.losses.formulas import RELATIVE

pytestmark = pytest.mark.filterwarnings("ignore:The model has no trainable weights")


def unit(x: torch.Tensor) -> torch.Tensor:
    return F.normalize(x, dim=1)


def info_nce(a: torch.Tensor, b: torch.Tensor, scale: Any, symmetric: bool, normalize: bool = True) -> torch.Tensor:
    """CLIP's loss, as its paper writes it; without the second direction that of contrastive predictive coding."""
    logits = scale * (unit(a) @ unit(b).T if normalize else a @ b.T)
    rows = torch.arange(len(a))
    loss = F.cross_entropy(logits, rows)
    return (loss + F.cross_entropy(logits.T, rows)) / 2 if symmetric else loss


@pytest.mark.parametrize(("symmetric", "normalize"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("opset", [11, 12, 18, 23])
def test_info_nce(opset: int, symmetric: bool, normalize: bool, tmp_path: Path) -> None:
    generator = np.random.default_rng(7)
    a, b = (generator.normal(size=(6, 8)).astype(np.float32) for _ in range(2))
    spec = LossSpec(
        type="info_nce", prediction="a", paired_prediction="b", temperature=0.2, symmetric=symmetric,
        normalize_embeddings=normalize,
    )  # fmt: skip
    model = pass_through(opset, {"a": ["batch", 8], "b": ["batch", 8]})
    outputs, names = run_loss(model, spec, {"a_in": a, "b_in": b}, tmp_path)
    exact = [torch.from_numpy(value).double().requires_grad_() for value in (a, b)]
    expected = info_nce(exact[0], exact[1], 1 / 0.2, symmetric, normalize)
    expected.backward()
    assert outputs["loss"] == pytest.approx(float(expected), rel=RELATIVE)
    assert outputs[names.counted] == 6
    given = [torch.from_numpy(value).requires_grad_() for value in (a, b)]
    to_torch(tmp_path / "with_loss.onnx")(*given)[2].backward()
    for own, reference in zip(given, exact, strict=True):
        torch.testing.assert_close(own.grad, reference.grad.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("spec", "shapes", "words"),
    [
        (
            LossSpec(type="info_nce", prediction="y", paired_prediction="z"),
            {"y": ["batch", 4], "z": ["batch", 5]},
            r"'y' is \[batch, 4\], loss.paired_prediction: 'z' is \[batch, 5\]; .* Name two outputs of the same size",
        ),
        (
            LossSpec(type="info_nce", prediction="y", paired_prediction="y", logit_scale="z"),
            {"y": ["batch", 4], "z": ["batch", 5]},
            r"loss.logit_scale: 'z' is \[batch, 5\]; expected one number",
        ),
    ],
)
def test_what_does_not_fit_is_refused(spec: LossSpec, shapes: dict[str, Shape], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        write_model_with_loss(pass_through(18, shapes), spec, tmp_path / "m.onnx")
