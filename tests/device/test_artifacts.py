"""`generate_artifacts` with the arguments that onnxruntime's had."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onward.device import LossType, OptimType, generate_artifacts
from onward.errors import ParametersError
from onward.losses.registry import LOSSES
from onward.optimizers.registry import OPTIMIZERS
from onward_device import Trainer
from tests.device.bundles import batches, samples
from tests.mlp import build_mlp
from tests.mlp import weights as stored


class TheirLossType(enum.Enum):
    """As `onnxruntime.training.artifacts.LossType`, whose values are numbers."""

    CrossEntropyLoss = 2


def test_the_old_arguments(tmp_path: Path) -> None:
    bundle = generate_artifacts(
        build_mlp(),
        requires_grad=["w2", "b2"],
        frozen_params=["w1", "b1"],
        loss=TheirLossType.CrossEntropyLoss,
        optimizer=OptimType.AdamW,
        artifact_directory=tmp_path,
        prefix="mnist_",
        label="label",
    )
    assert bundle == tmp_path / "mnist_bundle"
    trainer = Trainer.load(bundle)
    begin = trainer.state()
    assert {one["name"] for one in trainer.bundle.manifest["state"] if one["kind"] == "weight"} == {"w2", "b2"}
    batch = batches(samples(), 1)[0]
    frozen = {name: torch.from_numpy(array) for name, array in stored().items()}
    weights = [torch.from_numpy(begin[name]).requires_grad_() for name in ("w2", "b2")]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, eps=1e-6, weight_decay=0.0)
    hidden = torch.relu(torch.from_numpy(batch["x"]) @ frozen["w1"] + frozen["b1"])
    loss = torch.nn.functional.cross_entropy(hidden @ weights[0] + weights[1], torch.from_numpy(batch["label"]))
    loss.backward()
    optimizer.step()
    assert trainer.train_step(batch) == pytest.approx(float(loss), rel=1e-6)
    for name, weight in zip(("w2", "b2"), weights, strict=True):
        assert np.abs(trainer.state()[name] - weight.detach().numpy()).max() < 1e-7


def test_every_old_name_is_something_here() -> None:
    assert {one.value for one in LossType} <= {kind.name for kind in LOSSES}
    assert {one.value for one in OptimType} <= {kind.name for kind in OPTIMIZERS}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ort_format": True}, "ort_format is True; bundles are ONNX files, which every ONNX Runtime reads"),
        ({"nominal_checkpoint": True}, "nominal_checkpoint is True; a bundle begins with the weights"),
        ({"custom_op_library": "a.so"}, "custom_op_library is given; operators of a library have no gradient"),
        ({"additional_output_names": ["h"]}, r"infer\.onnx of a bundle has all outputs of the model"),
        ({"loss": "HuberLoss"}, "loss is 'HuberLoss'; expected one of MSELoss, CrossEntropyLoss, BCEWithLogitsLoss"),
        ({"optimizer": "Lion", "loss": LossType.MSELoss}, "optimizer is 'Lion'; expected one of AdamW, SGD"),
    ],
)
def test_arguments_without_a_counterpart(arguments: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ParametersError, match=words):
        generate_artifacts(build_mlp(), artifact_directory=tmp_path, **arguments)
