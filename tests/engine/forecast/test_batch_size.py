"""Finding a micro-batch: against the memory of the run itself, with the bits of a run that was given it, by many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch

from onward.checkpoint.reading import find_latest, read_record
from onward.cli import main
from onward.data.in_memory import InMemoryDataLoader
from onward.engine.building.preparation import read_training_graph
from onward.engine.forecast import batch_size
from onward.engine.forecast.batch_size import find_batch_size
from onward.engine.forecast.trial import trial_bytes
from onward.errors import ParametersError
from onward.models import create_model
from onward.parallel.launch.process import in_world_of_one, start
from onward.parameters import Parameters
from onward.plan.batch_size import with_micro_batches
from onward.runner import TrainingRunner
from tests.mlp import ON_ONE_THREAD, assert_same_bits, data, parameters, save_mlp, state_bits
from tests.ranks import run_on_ranks
from tests.watching import Recorder

FOUND = "training.find_batch_size: micro-batches of "


def save_gpt2(folder: Path) -> Path:
    path = folder / "model.onnx"
    options: dict[str, Any] = {"layers": 1, "width": 16, "heads": 2, "vocab_size": 32, "context_length": 8}
    ir.save(create_model("gpt2", size="tiny", dropout=0.0, **options), path)
    return path


def gpt2_parameters(path: Path, gb: float, **distributed: Any) -> Parameters:
    return Parameters.from_mapping(
        {
            "paths": {"model_path": path},
            "loss": {"type": "softmax_cross_entropy", "prediction": "logits", "label": "labels"},
            "training": {
                "batch_size": 2,
                "num_train_steps": 16,
                "gradient_accumulation_steps": 4,
                "mapped_dimensions": {"sequence": 8},
                "find_batch_size": True,
            },
            "learning_rate": {"initial_lr": 0.01},
            "optimizer": {"training_optimizer_name": "AdamW"},
            "machine": {"memory_gb": gb},
            "distributed": distributed,
        }
    )


def trained_bytes(parameters: Parameters) -> float:
    graph = read_training_graph(parameters, parameters.paths.model_path)
    taken = trial_bytes(parameters, in_world_of_one(), graph, {})
    assert taken is not None
    return taken


def found_by_one(parameters: Parameters) -> int:
    graph = read_training_graph(parameters, parameters.paths.model_path)
    return find_batch_size(parameters, in_world_of_one(), graph, {})[0].training.batch_size


def test_it_is_the_largest_that_fits(tmp_path: Path) -> None:
    """With a byte less than the trial of a size takes, the next smaller one is found."""
    path = save_gpt2(tmp_path)
    asked = gpt2_parameters(path, 1.0)
    takes = {size: trained_bytes(with_micro_batches(asked, size)) for size in (2, 4)}
    assert takes[2] < takes[4]
    assert found_by_one(gpt2_parameters(path, takes[4] / 1e9)) == 4
    assert found_by_one(gpt2_parameters(path, (takes[4] - 1) / 1e9)) == 2
    assert found_by_one(gpt2_parameters(path, 1.0)) == 8, "all samples of the update"


def test_a_trial_that_runs_out_of_memory_is_followed_by_a_smaller_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def scarce(parameters: Parameters, *_: Any) -> float | None:
        tried.append(parameters.training.batch_size)
        return None if tried[-1] > 3 else 1.0

    monkeypatch.setattr(batch_size, "trial_bytes", scarce)
    assert found_by_one(gpt2_parameters(save_gpt2(tmp_path), 1.0)) == 2
    assert tried == [8, 4, 2]


def test_out_of_memory_in_a_step_is_a_trial_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    asked = gpt2_parameters(save_gpt2(tmp_path), 1.0)
    graph = read_training_graph(asked, asked.paths.model_path)
    monkeypatch.setattr("onward.engine.steps.Steps.update", full)
    assert trial_bytes(asked, in_world_of_one(), graph, {}) is None
    with pytest.raises(ParametersError, match=r"one of 1 samples ran out of memory on trial. Save memory by recompute"):
        find_batch_size(asked, in_world_of_one(), graph, {})


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


# -------------------------------------------------------------------------------------------------------------- runs

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


# ------------------------------------------------------------------------------------------------------------- ranks


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
