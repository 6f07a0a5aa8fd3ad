"""Steps of a run that leave nothing behind."""

from __future__ import annotations

from onward.commands.rehearsal import without_traces
from onward.parameters import Parameters

SECTIONS = {
    "paths": {"model_path": "m.onnx", "output_dir": "out", "test_data_dir": "test"},
    "loss": {"type": "output", "prediction": "y"}, "learning_rate": {"initial_lr": 0.5, "warmup_mode": "cosine"},
    "training": {"batch_size": 3, "num_epochs": 7, "evaluation_period_epochs": 1, "seed": 5},
    "checkpoint": {"checkpoints_dir": "kept", "checkpoint_period": 2}, "tensorboard": {"log_dir": "tb"},
    "profiler": {"first_step": 1, "last_step": 2}, "early_stopping": {"patience": 2},
    "next_rounds": [{"training": {"num_epochs": 1}}],
}  # fmt: skip


def test_nothing_is_written_or_resumed_from() -> None:
    asked = Parameters.from_mapping(SECTIONS)
    short = without_traces(asked, 4)
    assert (short.training.num_train_steps, short.training.num_epochs) == (4, None)
    assert (short.paths.output_dir, short.checkpoint.checkpoints_dir, short.tensorboard.log_dir) == (None, None, None)
    assert (short.profiler.first_step, short.early_stopping.patience, short.next_rounds) == (None, None, ())
    assert short.training.skip_evaluation


def test_what_is_computed_stays() -> None:
    asked = Parameters.from_mapping(SECTIONS)
    short = without_traces(asked, 4)
    assert (short.training.batch_size, short.training.seed, short.loss) == (3, 5, asked.loss)
    assert short.learning_rate.initial_lr == 0.5
    assert short.learning_rate.warmup_mode == "none"
    assert asked.training.num_epochs == 7
