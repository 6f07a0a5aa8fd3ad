"""`onward reference`: shards with the log-probabilities of a reference train as a reference in every step does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from onward.cli import main
from onward.data.shard_format import read_samples
from onward.data.shard_writer import ShardWriter
from tests.losses.test_dpo import LOSS, PAIRS, RATE, UPDATES, other_model, pairs, run
from tests.mlp import weights_of


@pytest.mark.parametrize("of_file", [True, False])
def test_log_probabilities_computed_once_train_as_those_of_every_step(
    of_file: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`onward reference` writes the same samples with what the reference gives; the run is the same to 1e-6."""
    data = pairs(PAIRS * UPDATES)
    ir.save(other_model(), tmp_path / "other.onnx")
    loss = {"reference_model_path": str(tmp_path / "other.onnx")} if of_file else {}
    first, _ = run(tmp_path, loss, data)
    samples = [{name: rows[number] for name, rows in data.items()} for number in range(PAIRS * UPDATES)]
    for folder, parts in (("shards", (samples[:5], samples[5:])), ("tests", (samples[:3],))):
        (tmp_path / folder).mkdir()
        for number, part in enumerate(parts):
            with ShardWriter(tmp_path / folder / f"{number}.pb") as writer:
                for sample in part:
                    writer.write(sample)
    sections = {
        "paths": {"model_path": "model.onnx", "train_data_dir": "shards", "test_data_dir": "tests"},
        "loss": {**LOSS, **loss},
        "training": {"batch_size": PAIRS, "num_train_steps": UPDATES},
        "learning_rate": {"initial_lr": RATE},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(sections))
    words = ["reference", str(tmp_path / "run.yaml"), str(tmp_path / "made")]
    assert main(words) == 0
    assert "loss.reference_log_probabilities: reference_log_probabilities" in capsys.readouterr().out
    assert main(words) == 2
    assert "already holds shards" in capsys.readouterr().err
    assert main([*words, "--loss.reference_log_probabilities", "x", "--loss.reference_model_path", "null"]) == 2
    assert "is given, so that the run computes no reference. Set loss.type: dpo" in capsys.readouterr().err
    made = [sample for name in ("0.pb", "1.pb") for sample in read_samples(tmp_path / "made" / "train" / name)]
    assert len(list(read_samples(tmp_path / "made" / "test" / "0.pb"))) == 3
    given = {name: np.stack([sample[name] for sample in made]) for name in made[0]}
    assert all(np.array_equal(given[name], rows) for name, rows in data.items())
    second, _ = run(tmp_path, {"reference_log_probabilities": "reference_log_probabilities"}, given)
    for name, one in weights_of(second).items():
        torch.testing.assert_close(weights_of(first)[name], one, rtol=0, atol=1e-6)
