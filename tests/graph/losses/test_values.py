"""Values that are compared: column labels, and float32 whatever the type of the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper

from onward.graph.losses.file import write_model_with_loss
from onward.graph.losses.spec import LossSpec
from tests.graph.loss_models import RELATIVE, RNG, assert_close, drawn_logits, pass_through, run_loss


@pytest.mark.parametrize("element_type", [TensorProto.FLOAT16, TensorProto.DOUBLE])
@pytest.mark.parametrize("opset", [9, 13])
@pytest.mark.parametrize("kind", ["softmax_cross_entropy", "mean_squared_error"])
def test_the_loss_is_float32_for_every_type_of_model(element_type: int, opset: int, kind: str, tmp_path: Path):
    """fp16 predictions are cast up before the loss, float64 ones computed as they are; the loss is float32."""
    dtype = helper.tensor_dtype_to_np_dtype(element_type)
    prediction = drawn_logits(5, 3).astype(dtype)
    wide = torch.from_numpy(prediction).to(torch.float32 if dtype == np.float16 else torch.float64)
    if kind == "softmax_cross_entropy":
        labels = RNG.integers(0, 3, size=5)
        reference = F.cross_entropy(wide, torch.from_numpy(labels))
    else:
        labels = RNG.normal(size=(5, 3)).astype(np.float32 if dtype == np.float16 else np.float64)
        reference = F.mse_loss(wide, torch.from_numpy(labels))
    model = pass_through(opset, {"y": ["N", 3]}, element_type)
    outputs, _ = run_loss(
        model, LossSpec(type=kind, prediction="y", label="t"), {"y_in": prediction, "t": labels}, tmp_path
    )
    assert_close(outputs["loss"], reference)


def test_column_labels_do_not_broadcast(tmp_path: Path):
    """A [batch] feature against a [batch, 1] prediction is compared row by row, not as [batch, batch]."""
    from onward import to_torch

    write_model_with_loss(
        pass_through(13, {"y": ["N", 1]}),
        LossSpec(type="mean_squared_error", prediction="y", label="t"),
        tmp_path / "m.onnx",
    )
    net = to_torch(tmp_path / "m.onnx")
    prediction, target = torch.randn(4, 1), torch.randn(4)
    loss = net(prediction, target)[-1]
    assert torch.allclose(loss, F.mse_loss(prediction[:, 0], target), rtol=RELATIVE)
