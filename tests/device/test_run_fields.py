"""The fields that a bundle was written with have to be those of the run that its states come back to."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import save_file

from onward.checkpoint.reading import find_checkpoint
from onward.checkpoint.run_record import read_run_record
from onward.cli import main
from onward.device.bundle import write_bundle
from onward.device.device_states import average_states, read_state, write_state
from onward.device.run_fields import check_fields, fields_of, write_fields
from onward.errors import CheckpointError
from onward.parameters import Parameters
from onward_device import Trainer
from tests.device.bundles import batches, run_file, samples
from tests.mlp import parameters, save_mlp

FIELDS = {
    "training.gradient_accumulation_steps": "2",
    "mixed_precision.use_mixed_precision": "true",
    "training.revive_dropout": "[{ratio: 0.1, after_operators: [Relu]}]",
}


def test_a_state_of_other_fields_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fields given on the command line are not in RUN.yaml; without them, 10 updates would be 10 steps, not 20."""
    save_mlp(tmp_path)
    run = run_file(tmp_path)
    trainer = Trainer.load(write_bundle(run, tmp_path / "bundle", overrides=FIELDS))
    for batch in batches(samples(), 20):
        trainer.train_step(batch)
    state = tmp_path / "state.safetensors"
    trainer.save_state(state)
    back = ["device", str(run), "--checkpoint.checkpoints_dir", str(tmp_path / "c")]
    assert main([*back, "--device-state", str(state)]) == 2
    told = capsys.readouterr().err
    assert "mixed_precision.use_mixed_precision was True for the bundle, and is False here" in told
    assert "training.gradient_accumulation_steps was 2 for the bundle, and is 1 here" in told
    assert "training.revive_dropout was [{'ratio': 0.1, 'after_operators': ['Relu']" in told
    assert "and is [] here. Pass the RUN.yaml and the --section.field values that the bundle was written with" in told
    assert not (tmp_path / "c").exists()
    merged = write_state(average_states([read_state(state)]), tmp_path / "merged.safetensors")
    assert main([*back, "--device-state", str(merged)]) == 2
    options = [one for name, value in FIELDS.items() for one in (f"--{name}", value)]
    assert main([*back, *options, "--device-state", str(merged)]) == 0
    assert "the state of a device after 10 updates is the checkpoint" in capsys.readouterr().out
    assert read_run_record(find_checkpoint(tmp_path / "c"))["counters"]["step"] == 20
    save_file(trainer.state(), state, {"format": "onward-device", "bundle": trainer.bundle.identity})
    back[-1] = str(tmp_path / "d")
    assert main([*back, *options, "--device-state", str(state)]) == 0
    assert "state.safetensors does not record the fields it was trained with: they are" in capsys.readouterr().out


def test_what_differs_by_machine_is_not_compared(tmp_path: Path) -> None:
    """Where files are, how a run is reported and how long it is; a path that is given where there was none differs."""
    recorded = write_fields(parameters(tmp_path, distillation={"teacher_path": "/a/teacher.onnx"}))
    moved = {"distillation": {"teacher_path": "/b/teacher.onnx"}, "distributed": {"data_parallel_size": 2}}
    same: Parameters = parameters(tmp_path, **moved, training={"num_train_steps": 7})
    check_fields(recorded, same, tmp_path / "state")
    assert not any(str(value).startswith("/") for value in fields_of(same).values())
    with pytest.raises(
        CheckpointError, match=r"distillation\.teacher_path was 'a file' for the bundle, and is None here"
    ):
        check_fields(recorded, parameters(tmp_path), tmp_path / "state")


@pytest.mark.parametrize(("recorded", "words"), [("{", "are damaged"), ("[1]", "are no fields of a run")])
def test_damaged_fields_are_refused(recorded: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"the run_fields of .*state {words}.*Save the state again"):
        check_fields(recorded, parameters(tmp_path), tmp_path / "state")
