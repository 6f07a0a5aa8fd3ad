"""A small run that `test_killed_runs` starts in a forked process, and kills."""

from __future__ import annotations

import time
from pathlib import Path

from onward.data.loader import DataLoader
from onward.engine.reports import StepReport
from onward.environment import Environment
from onward.parameters import Parameters
from onward.report.watching import make_watchers
from onward.runner import TrainingRunner
from tests.watching import Recorder

STEPS = 60


class Slow(Recorder):
    """Gives the killer time: the run would be over before the first signal."""

    def on_step(self, report: StepReport) -> None:
        time.sleep(0.01)


def main(folder: Path) -> None:
    """Trains in a folder beside the model and its data, and exports; a file `ready` is there from the start on."""
    parameters = Parameters.from_mapping(
        {
            "paths": {
                "model_path": folder.parent / "model.onnx",
                "train_data_dir": folder.parent / "data",
                "output_dir": folder,
            },
            "data": {"shuffle_data": True},
            "loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"},
            "training": {
                "batch_size": 4,
                "num_train_steps": STEPS,
                "gradient_accumulation_steps": 2,
                "display_loss_steps": 1,
                "seed": 7,
            },
            "learning_rate": {"initial_lr": 1e-2, "warmup_mode": "cosine", "warmup_steps": 10},
            "optimizer": {"training_optimizer_name": "AdamW", "max_norm_clip": 1.0},
            "mixed_precision": {"use_mixed_precision": True, "loss_scale": 0},
            "checkpoint": {"checkpoints_dir": folder / "checkpoints", "checkpoint_period": 2, "max_num_checkpoints": 2},
        }
    )
    watchers = make_watchers(metrics_path=folder / "metrics.jsonl", resumed_update=None)
    runner = TrainingRunner(
        parameters, Environment(execution_provider="CPU", threads=1), [Slow(), *watchers.watchers], progress=False
    )
    runner.initialize()
    (folder / "ready").touch()
    assert parameters.paths.train_data_dir is not None
    with DataLoader({}, parameters.paths.train_data_dir, shuffle=True, seed=7) as loader:
        if runner.round == 0:
            runner.run(loader)
    runner.end_training()
