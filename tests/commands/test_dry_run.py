"""A dry run: one update without anything that is written, and what it says of the real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onward.commands import dry_run
from onward.parameters import Parameters
from tests.report.events import run_summary


def asked(**sections: Any) -> Parameters:
    mapping = {
        "paths": {"model_path": "m.onnx"}, "loss": {"type": "output", "prediction": "y"},
        "training": {"batch_size": 2, "num_train_steps": 12, "gradient_accumulation_steps": 4},
        "learning_rate": {"initial_lr": 1.0},
    }  # fmt: skip
    return Parameters.from_mapping({**mapping, **sections})


def test_one_update_that_leaves_nothing(tmp_path: Path) -> None:
    run = asked(
        paths={"model_path": "m.onnx", "output_dir": tmp_path / "out"},
        checkpoint={"checkpoints_dir": tmp_path / "kept", "checkpoint_to_load_path": tmp_path / "from"},
        tensorboard={"log_dir": tmp_path / "tb"},
    )
    short = dry_run._of_one_update(run)
    assert short.training.num_train_steps == 4
    assert (short.paths.output_dir, short.tensorboard.log_dir, short.checkpoint.checkpoints_dir) == (None, None, None)
    assert short.checkpoint.checkpoint_to_load_path == tmp_path / "from"


def test_what_it_says(tmp_path: Path) -> None:
    nothing = dry_run._lines(asked(), run_summary(samples=8, last_loss=None), is_tested=False)
    assert nothing[0].startswith("one update of 8 samples took ")
    assert nothing[0].endswith("specialization; the run has 3 updates.")
    assert nothing[1:] == [
        "there are no test data, so nothing would be evaluated.",
        "the run would write nothing.",
        "nothing was written.",
    ]
    run = asked(paths={"model_path": "m.onnx", "output_dir": tmp_path / "out"})
    lines = dry_run._lines(run, run_summary(last_loss=0.5), is_tested=True)
    assert ", loss 0.5000; the run has" in lines[0]
    assert lines[1] == "the test data fit the model."
    assert lines[2] == f"the run would write the trained model to {tmp_path / 'out'}."
