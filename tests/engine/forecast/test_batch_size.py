"""Finding a micro-batch: against the memory of the run itself, with the bits of a run that was given it, by many."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from onward.checkpoint.reading import find_latest, read_record
from onward.cli import main
from onward.data.in_memory import InMemoryDataLoader
from onward.engine.building.preparation import read_training_graph
from onward.engine.forecast import batch_size
from onward.engine.forecast.batch_size import BatchSizes, find_batch_size
from onward.engine.forecast.trial import trial_bytes
from onward.engine.state import Counters
from onward.errors import ParametersError
from onward.parallel.launch.process import in_world_of_one, start
from onward.parameters import Parameters
from onward.parameters.changes import notes_on_changes
from onward.plan.batch_size import with_micro_batches
from onward.plan.elastic import fit_to_ranks
from onward.runner import TrainingRunner
from tests.engine.forecast.limited_memory import found_by_one, gpt2_parameters, save_gpt2
from tests.mlp import ON_ONE_THREAD, assert_same_bits, data, parameters, save_mlp, state_bits
from tests.ranks import run_on_ranks
from tests.watching import Recorder

FOUND = "training.find_batch_size: micro-batches of "


def trained_bytes(parameters: Parameters) -> float:
    graph = read_training_graph(parameters, parameters.paths.model_path)
    taken = trial_bytes(parameters, in_world_of_one(), graph, {})
    assert taken is not None
    return taken


def test_it_is_the_largest_that_fits(tmp_path: Path) -> None:
    """With a byte less than the trial of a size takes, the next smaller one is found."""
    path = save_gpt2(tmp_path)
    asked = gpt2_parameters(path, 1.0)
    takes = {size: trained_bytes(with_micro_batches(asked, size)) for size in (2, 4)}
    assert takes[2] < takes[4]
    assert found_by_one(gpt2_parameters(path, takes[4] / 1e9)) == 4
    assert found_by_one(gpt2_parameters(path, (takes[4] - 1) / 1e9)) == 2
    assert found_by_one(gpt2_parameters(path, 1.0)) == 8, "all samples of the update"


def test_too_little_memory(tmp_path: Path) -> None:
    with pytest.raises(ParametersError) as caught:
        found_by_one(gpt2_parameters(save_gpt2(tmp_path), 1e-5))
    assert str(caught.value).startswith(
        "training.find_batch_size: no micro-batch fits 1e-05 GB: by the forecast, one of 1 samples needs "
    )
    assert "machine.memory_gb" in str(caught.value)


def test_a_batch_that_is_fixed_is_not_sought(tmp_path: Path) -> None:
    save_mlp(tmp_path)
    fixed = parameters(tmp_path, training={"find_batch_size": True, "mapped_dimensions": {"batch": 4}})
    with pytest.raises(ParametersError, match=r"batch of input 'x' is fixed to 4 in training.mapped_dimensions"):
        found_by_one(fixed)


ASKED = {"batch_size": 4, "num_train_steps": 24, "gradient_accumulation_steps": 4, "display_loss_steps": 1}
GIVEN = {**ASKED, "batch_size": 16, "num_train_steps": 6, "gradient_accumulation_steps": 1}
SOUGHT = {**ASKED, "find_batch_size": True}


def run(folder: Path, training: dict[str, Any], steps: int | None = None, **sections: Any) -> tuple[Any, Recorder]:
    """A run over a network with dropout and running statistics, which draw and change in every pass."""
    recorder = Recorder()
    if not (folder / "mlp.onnx").exists():
        save_mlp(folder, dropout=0.3, normalized=True)
    runner = TrainingRunner(parameters(folder, training=training, **sections), ON_ONE_THREAD, [recorder])
    runner.initialize()
    runner.run(InMemoryDataLoader(data(48)))
    runner.end_training()
    return runner, recorder


def test_a_run_that_finds_its_batch_has_the_bits_of_one_that_was_given_it(tmp_path: Path) -> None:
    sought, recorder = run(tmp_path, SOUGHT, machine={"memory_gb": 1.0})
    given, _ = run(tmp_path, GIVEN)
    assert_same_bits(state_bits(sought), state_bits(given))
    (said,) = [text for text in recorder.messages if text.startswith(FOUND)]
    assert said.startswith(
        FOUND + "16 samples, 1 an update, instead of 4 and 4; so num_train_steps is 6 instead of 24 (tried: "
    )


def test_a_resumed_run_keeps_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = {"checkpoint": {"checkpoints_dir": tmp_path / "saved", "checkpoint_period": 1, "max_num_checkpoints": 9}}
    whole, _ = run(tmp_path, SOUGHT, machine={"memory_gb": 1.0}, **saving)
    latest = find_latest(tmp_path / "saved")
    assert latest is not None
    record = read_record(latest)
    assert record["batch_sizes"] == {"0": [16, 16]}
    assert record["parameters"]["training"]["batch_size"] == 16
    again = {"checkpoint": {"checkpoint_to_load_path": tmp_path / "saved/checkpoint-00000002"}}
    monkeypatch.setattr(batch_size, "find_batch_size", None)  # would fail if it were called
    resumed, recorder = run(tmp_path, SOUGHT, machine={"memory_gb": 1e-6}, **again)
    assert_same_bits(state_bits(resumed), state_bits(whole))
    (said,) = [text for text in recorder.messages if text.startswith(FOUND)]
    assert said.endswith("num_train_steps is 6 instead of 24, as in this run so far.")


def test_a_round_that_was_begun_by_hand_is_not_given_another_batch(tmp_path: Path) -> None:
    run(tmp_path, GIVEN, checkpoint={"checkpoints_dir": tmp_path / "saved"})
    with pytest.raises(ParametersError, match="round 0, which was begun with micro-batches of the configured size"):
        run(tmp_path, SOUGHT, checkpoint={"checkpoints_dir": tmp_path / "saved"})


def test_every_round_has_its_own(tmp_path: Path) -> None:
    save_mlp(tmp_path)
    recorder = Recorder()
    asked = parameters(tmp_path, training=SOUGHT, machine={"memory_gb": 1.0})
    runner = TrainingRunner(asked, ON_ONE_THREAD, [recorder])
    runner.initialize()
    loader = InMemoryDataLoader(data(48))
    runner.run(loader)
    runner.update_parameters(parameters(tmp_path, training={**SOUGHT, "batch_size": 8}, machine={"memory_gb": 1.0}))
    summary = runner.run(loader)
    assert (summary.batch_size, summary.steps, summary.updates) == (32, 6, 6)
    assert [text.split(" samples")[0] for text in recorder.messages if text.startswith(FOUND)] == [
        FOUND + "16",
        FOUND + "32",
    ]


@pytest.mark.parametrize(("ranks", "step"), [(2, 20), (3, 20), (4, 10), (1, 40)])
def test_an_elastic_run_counts_the_steps_of_its_checkpoint_anew(tmp_path: Path, ranks: int, step: int) -> None:
    """10 updates of 2 replicas with 2 micro-batches of 6 samples: with 3 replicas 2 of 4, with 4 one of 6."""
    training = {"batch_size": 6, "gradient_accumulation_steps": 2, "num_train_steps": 48}
    sections = {"checkpoint": {"checkpoints_dir": "c"}, "training": training}
    asked = parameters(tmp_path, distributed={"data_parallel_size": 2, "elastic": True}, **sections)
    fitted = fit_to_ranks(asked, ranks)[0]
    counters, record = Counters(step=20, update=10), {"parameters": asked.to_mapping()}
    notes = BatchSizes().restate([fitted], record, counters)
    assert (counters.step, counters.update) == (step, 10)
    assert counters.step == 10 * fitted.training.gradient_accumulation_steps
    now = f"step {step} with {fitted.training.gradient_accumulation_steps} of {fitted.training.batch_size} samples."
    assert notes == ([] if step == 20 else [f"step 20, with 2 micro-batches of 6 samples an update, is {now}"])
    assert notes_on_changes([fitted], record, 20) == []
    other = dataclasses.replace(fitted, training=dataclasses.replace(fitted.training, batch_size=1))
    assert BatchSizes().restate([other], record, counters) == [], "another number of samples in an update"


def test_the_plan_finds_it_by_forecast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_gpt2(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(
        "paths: {model_path: model.onnx}\n"
        "loss: {type: softmax_cross_entropy, prediction: logits, label: labels}\n"
        "training: {batch_size: 2, num_train_steps: 16, gradient_accumulation_steps: 4,\n"
        "           find_batch_size: true, mapped_dimensions: {sequence: 8}}\n"
        "learning_rate: {initial_lr: 0.01}\n"
    )
    assert main(["plan", str(file), "--machine.memory_gb=1"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert FOUND + "8 samples, 1 an update, instead of 2 and 4" in printed
    assert "Fits 1 GB" in printed
    if not torch.cuda.is_available():
        assert main(["plan", str(file)]) == 2
        assert "Pass --memory-gb, or set machine.memory_gb" in capsys.readouterr().err


def found_by_rank(path: Path, gb: tuple[float, float], distributed: dict[str, Any]) -> tuple[int, str]:
    mesh = start(Parameters.from_mapping(gpt2_parameters(path, 1.0, **distributed).to_mapping()).distributed, "cpu")
    asked = gpt2_parameters(path, gb[mesh.rank], **distributed)
    chosen, note = find_batch_size(asked, mesh, read_training_graph(asked, path), {})
    return chosen.training.batch_size, note.rpartition("(")[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "how"),
    [
        ({"data_parallel_size": 2}, "tried"),
        ({"data_parallel_size": 2, "zero_stage": 3}, "forecast"),
        ({"pipeline_parallel_size": 2}, "forecast"),
    ],
)
def test_all_ranks_agree_on_what_fits_the_poorest(tmp_path: Path, split: dict[str, Any], how: str) -> None:
    path = save_gpt2(tmp_path)
    limit = trained_bytes(with_micro_batches(gpt2_parameters(path, 1.0), 4)) / 1e9
    one, other = run_on_ranks(2, found_by_rank, path, (1.0, limit), split)
    assert one == other
    assert one[0] < 8
    assert one[1].startswith(how)
