"""Another model that is merged and does not train, as the reference of preferences; teachers: `graph/distillation`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from onward.errors import UserError
from tests.losses.test_dpo import PAIRS, UPDATES, WORDS, other_model, pairs, run
from tests.mlp import weights_of


def test_another_file_is_the_reference(tmp_path: Path) -> None:
    """The run equals that of its log-probabilities as a feature, to 1e-6; its weights stay and are not exported."""
    data, other = pairs(PAIRS * UPDATES), other_model("scores")
    ir.save(other, tmp_path / "other.onnx")
    first, told = run(tmp_path, {"reference_model_path": tmp_path / "other.onnx"}, data)
    stored = other.graph.initializers["table"].const_value
    assert stored is not None
    logits = torch.from_numpy(stored.numpy().copy())[torch.from_numpy(data["input_ids"])]
    counted = torch.from_numpy(data["labels"]) != -100
    labels = torch.where(counted, torch.from_numpy(data["labels"]), 0)
    found = (logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0] * counted).sum(-1)
    second, expected = run(tmp_path, {"reference_log_probabilities": "reference"}, {**data, "reference": found.numpy()})
    for name, one in weights_of(second).items():
        torch.testing.assert_close(weights_of(first)[name], one, rtol=0, atol=1e-6)
    assert told[0] == pytest.approx(expected[0], rel=1e-5)
    assert told[1] == pytest.approx(expected[1], rel=1e-5)
    assert abs(told[0]["loss"] - np.log(2)) > 0.01


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ({"reference_model_path": "words.onnx"}, r"has 12 classes and the model 11; give a reference of the same"),
        ({"reference_model_path": "none.onnx"}, r"none\.onnx"),
        ({"reference_model_path": "model.onnx"}, "is the trained model itself; remove it: a frozen copy is the refer"),
        ({"reference_model_path": "words.onnx", "reference_log_probabilities": "r"}, "are two references; remove one"),
    ],
)
def test_references_that_are_refused(loss: dict[str, Any], words: str, tmp_path: Path) -> None:
    ir.save(other_model(words=WORDS + 1), tmp_path / "words.onnx")
    given = {**loss, "reference_model_path": tmp_path / loss["reference_model_path"]}
    with pytest.raises(UserError, match=words):
        run(tmp_path, given, pairs(PAIRS))
