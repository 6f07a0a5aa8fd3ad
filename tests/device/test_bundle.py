"""Bundles from the command line, and runs that have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from onward.cli import main
from onward.data.in_memory import InMemoryDataLoader
from onward.device.bundle import why_no_bundle
from onward.parameters import Parameters
from onward_device import BundleError, Trainer
from tests.device.bundles import samples, sections
from tests.mlp import CROSS_ENTROPY, parameters, start


def test_the_command_line_writes_a_bundle_that_begins_with_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner, _ = start(tmp_path, checkpoint={"checkpoints_dir": tmp_path / "checkpoints"})
    runner.run(InMemoryDataLoader(samples(32)))
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump({"paths": {"model_path": "mlp.onnx"}, "loss": CROSS_ENTROPY, **sections()}))
    bundle = tmp_path / "bundle"
    options = ["--checkpoint", str(tmp_path / "checkpoints"), "--training.mapped_dimensions", "{batch: 4}"]
    options += ["--mixed_precision.use_mixed_precision", "true", "--distributed.data_parallel_size", "2"]
    options += ["--early_stopping.patience", "2", "--checkpoint.checkpoints_dir", str(tmp_path / "others")]
    options += ["--training.evaluation_period", "10", "--checkpoint.checkpoint_period", "10"]
    options += ["--checkpoint.keep_best", "true", "--checkpoint.export", "best", "--on_bad_loss.spike_threshold", "5"]
    assert main(["device", str(run), "-o", str(bundle), *options]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines()[-1] == f"wrote {bundle}"
    assert "mixed_precision: steps compute in fp16 with fp32 master weights and a loss scale" in told.out + told.err
    assert "a device trains alone: the section distributed is ignored" in told.out
    assert (
        "left out of the bundle: the section early_stopping, checkpoint.keep_best, checkpoint.export: best, which read "
        "evaluations of `onward train`. On a device the program that trains calls evaluate, saves the state where it "
        "is the best, and decides when to stop."
    ) in told.out
    assert "left out of the bundle: on_bad_loss.spike_threshold, which returns to checkpoints" in told.out
    trainer = Trainer.load(bundle)
    for name, weight in runner.net.weights.items():
        assert np.array_equal(trainer.state()[name], weight.detach().numpy())
    with pytest.raises(BundleError, match=r"'x' has the shape \[5, 6\]; expected \[4, 6\]"):
        trainer.train_step({"x": np.zeros((5, 6), np.float32), "label": np.zeros(5, np.int64)})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"averaging": {"kind": "ema"}}, "averaging.kind is ema. Remove averaging."),
        ({"pruning": {"pattern": "magnitude", "sparsity": 0.5}}, "pruning.pattern is magnitude. Remove pruning."),
        ({"training": {"unfreeze": [{"after_updates": 2, "weights": "w1"}]}}, "training.unfreeze freezes weights for"),
        ({"next_rounds": [{}]}, "there are 1 next_rounds, and a bundle holds one round. Remove them."),
        ({"loss": {"type": "function", "function": print}}, "loss.type is function, which is computed outside of the"),
    ],
)
def test_fields_that_a_device_has_no_counterpart_of(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    asked: Parameters = parameters(tmp_path, **changes)
    assert why_no_bundle(asked).startswith(words)
