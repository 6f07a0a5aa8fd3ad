"""Losses, gradients and batch statistics that are not finite: updates are skipped, and a run that only skips ends with
the files and samples that it read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import yaml

from onward.cli import main
from onward.data.in_memory import InMemoryDataLoader
from onward.data.loader import DataLoader
from onward.engine import steps
from onward.errors import ParametersError
from onward.parameters import Parameters
from tests.initializers import stored_arrays
from tests.mlp import CROSS_ENTROPY, SQUARES, assert_same_bits, data, save_mlp, start, state_bits, write_shards
from tests.ranks import run_on_ranks


def outlier(value: float, row: int = 9) -> dict[str, np.ndarray]:
    features = data(32)
    features["x"][row, 2] = value
    return features


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("value", [1e22, -3e25, 1e38])
def test_a_finite_outlier_does_not_reach_the_running_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_device: bool, value: float
) -> None:
    """Its square overflows the variance, though loss and gradients may be finite: the update is skipped, and the
    statistics, weights and moments are those of a run in which the batch was NaN, which is skipped, too."""
    save_mlp(tmp_path, normalized=True)
    monkeypatch.setattr(steps, "skips_on_device", lambda _: on_device)
    changes: dict[str, Any] = {"optimizer": {"training_optimizer_name": "AdamW"}}
    found = []
    for one in (value, np.nan):
        runner, _ = start(tmp_path, **changes)
        assert runner.run(InMemoryDataLoader(outlier(one))).skipped_updates == 1
        found.append(state_bits(runner))
    assert all(tensor.isfinite().all() for tensor in found[0].values() if tensor.is_floating_point())
    assert_same_bits(found[0], found[1])


def test_the_exported_variance_is_finite(tmp_path: Path) -> None:
    save_mlp(tmp_path, normalized=True)
    runner, _ = start(tmp_path, paths={"output_dir": tmp_path / "out"})
    runner.run(InMemoryDataLoader(outlier(1e22)))
    runner.end_training()
    model = onnx.load(runner.trained_model_path)
    tensors = stored_arrays(model)
    assert np.isfinite(tensors["running_var"]).all()


def test_a_loss_that_overflows_skips_its_update(tmp_path: Path) -> None:
    """The square of 1e25 is infinite in float32, the gradient is not."""
    features = data(32)
    features["target"][9, 1] = 1e25
    runner, _ = start(tmp_path, loss=SQUARES, optimizer={"training_optimizer_name": "AdamW"})
    assert runner.run(InMemoryDataLoader(features)).skipped_updates == 1


def _train_on_two(folder: Path) -> tuple[int, list[np.ndarray]]:
    """The second replica alone has the outlier."""
    rank = torch.distributed.get_rank()
    runner, _ = start(folder, distributed={"data_parallel_size": 2}, training={"num_train_steps": 4})
    skipped = runner.run(InMemoryDataLoader(outlier(1e22) if rank else data(32, seed=3))).skipped_updates
    return skipped, [tensor.cpu().numpy() for name, tensor in state_bits(runner).items() if "random" not in name]


def test_all_ranks_skip_alike(tmp_path: Path) -> None:
    save_mlp(tmp_path, normalized=True)
    (skipped, first), (others, second) = run_on_ranks(2, _train_on_two, tmp_path)
    assert skipped == others == 1
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.isfinite(one).all()


def write_broken(folder: Path, rows: slice = slice(None)) -> DataLoader:
    features = data(40)
    features["x"][rows, 1] = np.nan
    return DataLoader({"target": ""}, write_shards(folder / "train", features))


@pytest.mark.parametrize("skip", [0, 3])
def test_a_run_that_only_skips_names_files_and_samples(tmp_path: Path, skip: int) -> None:
    runner, recorder = start(tmp_path, on_bad_loss={"skip": skip}, training={"num_train_steps": 100})
    with pytest.raises(ParametersError) as caught:
        runner.run(write_broken(tmp_path))
    text = str(caught.value)
    assert text.startswith(f"the last {skip + 1} weight updates were skipped, since their losses, gradients or batch ")
    assert f"on_bad_loss.skip allows {skip} in a row." in text
    first = 4 * skip
    assert f"pdate {skip + 1} read 0.pb: samples {first}, {first + 1}, {first + 2}, {first + 3}" in text
    assert re.search(r"feature 'x' of sample \d+ of .*/train/0\.pb holds values that are not finite\.", text)
    assert runner.state.counters.update == skip + 1
    noted = [message for message in recorder.messages if "is skipped" in message]
    assert noted == [
        "update 1 is skipped: its loss, gradient or batch statistics are not finite (0.pb: samples 0, 1, 2, 3)."
    ]


def test_as_many_as_allowed_are_skipped(tmp_path: Path) -> None:
    """Three bad batches in a row, and 3 allowed: the run continues, counts anew, and trains."""
    features = data(80)
    features["x"][0:12, 1] = np.nan
    features["x"][32:44, 1] = np.nan
    runner, _ = start(tmp_path, on_bad_loss={"skip": 3}, training={"num_train_steps": 20})
    summary = runner.run(InMemoryDataLoader(features))
    assert (summary.updates, summary.skipped_updates) == (20, 6)


def test_nothing_is_written_as_if_it_had_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_mlp(tmp_path)
    write_broken(tmp_path).close()
    run = {
        "paths": {"model_path": "mlp.onnx", "train_data_dir": "train", "output_dir": "out"},
        "data": {"input_name_map": {"target": ""}},
        "loss": dict(CROSS_ENTROPY),
        "training": {"batch_size": 4, "num_train_steps": 50},
        "learning_rate": {"initial_lr": 0.1},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    assert main(["train", str(tmp_path / "run.yaml")]) == 2
    shown = capsys.readouterr()
    assert "the last 11 weight updates were skipped" in shown.err
    assert "0.pb: samples" in shown.err
    assert not list((tmp_path / "out").glob("*.onnx"))


def test_the_default(tmp_path: Path) -> None:
    save_mlp(tmp_path)
    runner, _ = start(tmp_path)
    assert isinstance(runner.parameters, Parameters)
    assert runner.parameters.on_bad_loss.skip == 10
