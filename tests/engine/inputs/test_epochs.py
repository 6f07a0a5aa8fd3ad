"""Runs that are given in epochs: the same bits as in steps, in Python and from the command line, resumed or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from onward.cli import main
from onward.errors import ParametersError
from tests.mlp import assert_same_bits, start, weights_of
from tests.test_cli import workplace, write_run  # noqa: F401
from tests.test_runner import loader

IN_EPOCHS = {"num_train_steps": None, "num_epochs": 2, "evaluation_period_epochs": 0.5}
SCHEDULE = {"initial_lr": 0.1, "warmup_mode": "cosine", "warmup_ratio": 0.25}


def test_epochs_train_like_the_steps_they_are(tmp_path: Path) -> None:
    source = loader()
    steps = 2 * source.sample_count // 4
    runner, recorder = start(tmp_path, training=IN_EPOCHS, learning_rate=SCHEDULE)
    runner.run(source, loader())
    assert recorder.messages[0].startswith(f"training.num_epochs: 2 epochs of {source.sample_count} samples in batches")
    assert [report.num_train_steps for report in recorder.steps] == [steps] * steps
    assert [report.step for report in recorder.evaluations] == list(range(steps // 4, steps + 1, steps // 4))
    other, expected = start(tmp_path, training={"num_train_steps": steps}, learning_rate=SCHEDULE)
    other.run(loader())
    assert [one.learning_rate for one in recorder.steps] == [one.learning_rate for one in expected.steps]
    assert_same_bits(weights_of(runner), weights_of(other))
    assert recorder.steps[-1].epoch == 1


def test_a_source_of_unknown_length_is_refused(tmp_path: Path) -> None:
    class Endless:
        """Batches without end of another loader, whose number of samples nobody knows."""

        def __init__(self) -> None:
            own = loader()
            self.batches, self.one_pass, self.feature_specs, self.close = (
                own.batches, own.one_pass, own.feature_specs, own.close,
            )  # fmt: skip

    runner, _ = start(tmp_path, training=IN_EPOCHS)
    words = r"^training\.num_epochs is 2\.0, but the training data \(Endless\) have no sample_count, so the"
    with pytest.raises(ParametersError, match=words):
        runner.run(Endless())  # type: ignore[arg-type]


def test_from_the_command_line(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    run = str(write_run(workplace, training={"num_train_steps": None, "num_epochs": 1.5, "display_loss_steps": 1}))
    assert main(["train", run]) == 0
    said = capsys.readouterr().out
    assert "training.num_epochs: 1.5 epochs of 24 samples in batches of 4 take 9 steps." in said
    assert said.index("training.num_epochs") < said.index("train  step")
    assert "step 9/9" in said
    assert main(["train", run]) == 0
    assert "all rounds of this run are already trained" in capsys.readouterr().out
    assert main(["train", run, "--training.num_epochs", "2"]) == 0
    said = capsys.readouterr().out
    assert "resumed from" in said
    assert "step 12/12" in said
