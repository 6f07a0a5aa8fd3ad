"""Labels that are no class are never a plausible number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from onward.errors import ModelError
from onward.graph.losses.file import write_model_with_loss
from onward.graph.losses.spec import LossSpec
from tests.graph.loss_models import drawn_logits, pass_through, run_loss


@pytest.mark.parametrize("opset", [7, 11, 12, 18])
def test_out_of_range_label_is_never_a_plausible_number(opset: int, tmp_path: Path):
    """A label that is no class gives NaN where nodes are spelled out, and an error where the operator checks."""
    feeds = {"logits_in": drawn_logits(3, 4), "labels": np.array([0, 9, 1])}
    spec = LossSpec(type="softmax_cross_entropy", prediction="logits", label="labels", ignore_index=1)
    model = pass_through(opset, {"logits": ["N", 4]})
    if opset < 12:
        assert np.isnan(run_loss(model, spec, feeds, tmp_path)[0]["loss"])
    else:
        from onward import to_torch

        write_model_with_loss(model, spec, tmp_path / "m.onnx")
        net = to_torch(tmp_path / "m.onnx")
        with pytest.raises(ModelError, match="label 9 is out of range for 4 classes"):
            net(torch.from_numpy(feeds["logits_in"]), torch.from_numpy(feeds["labels"]))
