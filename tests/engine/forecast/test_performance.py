from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from onward.cli import main
from onward.engine.building.preparation import feature_ranges, read_training_graph
from onward.engine.building.sizes import known_dimensions
from onward.engine.forecast.performance import synthetic_loader
from onward.engine.loop import Clock
from onward.models import create_model
from onward.parameters import Parameters

SECTIONS = {
    "loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"},
    "training": {"batch_size": 3, "num_train_steps": 4, "is_perf_test": True, "mapped_dimensions": {"sequence": 8}},
    "learning_rate": {"initial_lr": 0.01},
}


def save_gpt2(folder: Path) -> Path:
    path = folder / "model.onnx"
    ir.save(create_model("gpt2", size="tiny", layers=1, width=16, heads=2, vocab_size=37, context_length=8), path)
    return path


def test_synthetic_data_fit_the_model(tmp_path: Path) -> None:
    parameters = Parameters.from_mapping({**SECTIONS, "paths": {"model_path": save_gpt2(tmp_path)}})
    graph = read_training_graph(parameters, parameters.paths.model_path)
    sizes = known_dimensions(parameters.training, graph, {})
    loader = synthetic_loader(parameters, graph, sizes, feature_ranges(parameters.loss, graph))
    batch = next(loader.batches(3)).features
    assert {name: array.shape for name, array in batch.items()} == {"input_ids": (3, 8), "labels": (3, 8)}
    everything = np.concatenate([b.features["input_ids"] for b in loader.one_pass(3)])
    assert everything.min() >= 0
    assert 20 < everything.max() < 37, "indices of the embedding's rows"


def test_a_run_without_data_says_how_fast_it_is_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_gpt2(tmp_path)
    run = tmp_path / "run.yaml"
    run.write_text(
        "paths: {model_path: model.onnx, output_dir: out}\n"
        "loss: {type: softmax_cross_entropy, prediction: logits, label: labels}\n"
        "training: {batch_size: 3, num_train_steps: 4, is_perf_test: true, mapped_dimensions: {sequence: 8},\n"
        "  evaluation_period: 2}\n"
        "learning_rate: {initial_lr: 0.01}\n"
        "checkpoint: {checkpoints_dir: out/checkpoints, keep_best: true, export: best}\n"
        "early_stopping: {patience: 5}\n"
        "on_bad_loss: {spike_threshold: 3}\n"
        "tensorboard: {log_dir: out/tensorboard}\n"
    )
    assert main(["train", str(run)]) == 0
    printed = capsys.readouterr().out
    for words in (
        "samples/s on synthetic data",
        " kFLOP a sample, ",
        "GFLOP/s of a large float32 matmul here",
        "MiB at most",
    ):
        assert words in printed
    assert not (tmp_path / "out").exists()


def test_a_size_that_is_not_known_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_gpt2(tmp_path)
    run = tmp_path / "run.yaml"
    run.write_text(
        "paths: {model_path: model.onnx}\n"
        "loss: {type: softmax_cross_entropy, prediction: logits, label: labels}\n"
        "training: {batch_size: 3, num_train_steps: 4, is_perf_test: true}\n"
        "learning_rate: {initial_lr: 0.01}\n"
    )
    assert main(["train", str(run)]) == 2
    assert "the sizes of 'sequence' of 'input_ids'" in capsys.readouterr().err


def test_the_first_step_says_nothing_of_later_ones() -> None:
    """Code is compiled in it, which can take a thousand times as long as a step."""
    clock = Clock()
    clock.add(100.0, 0.0, 4)
    assert clock.stable_samples_per_second == pytest.approx(0.04), "where there is no other"
    assert clock.seconds_of_a_step == pytest.approx(100.0)
    for _ in range(3):
        clock.add(0.5, 0.1, 4)
    assert clock.stable_samples_per_second == pytest.approx(8.0)
    assert clock.seconds_of_a_step == pytest.approx(0.5), "by which the time left is told"
    assert clock.samples_per_second == pytest.approx(16 / 101.5)
