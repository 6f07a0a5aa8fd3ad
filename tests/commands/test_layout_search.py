"""`distributed.layout: auto` of `onward train`: for which processes, as which fields, and as in which checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from onward.commands import layout_search
from onward.commands.layout_search import chosen_overrides
from onward.engine.forecast import hardware_here
from onward.errors import ParametersError
from onward.parallel.rendezvous.launcher import Launch
from onward.parameters import Parameters
from onward.plan.search.hardware import KNOWN, Link
from onward.report.phases import Phases
from tests.mlp import data, save_mlp, write_shards

TORCHRUN = Launch(launcher="torchrun", world_size=4, local_size=2)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(layout_search, "cluster_here", lambda *_, **__: KNOWN["a100"])
    save_mlp(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(
        """
paths: {model_path: mlp.onnx, output_dir: out}
loss: {type: softmax_cross_entropy, prediction: logits, label: labels}
training: {batch_size: 16, gradient_accumulation_steps: 2, num_train_steps: 20, evaluation_period: 4}
learning_rate: {initial_lr: 0.1}
checkpoint: {checkpoints_dir: checkpoints}
distributed: auto
"""
    )
    return path


def resolved(run: Path, launch: Launch = TORCHRUN, **overrides: str) -> tuple[Parameters, str]:
    """The run with its layout, and the note."""
    asked = {name.replace("__", "."): value for name, value in overrides.items()}
    found, note = chosen_overrides(Parameters.load(run, asked), asked, launch, Phases.silent())
    return Parameters.load(run, found), note


def test_a_layout_takes_the_place_of_auto_and_updates_stay(run: Path) -> None:
    assert Parameters.load(run).distributed.layout == "auto"
    parameters, note = resolved(run)
    sizes, training = parameters.distributed, parameters.training
    assert sizes.layout == "manual"
    assert sizes.data_parallel_size * sizes.horizontal_parallel_size * sizes.pipeline_parallel_size == 4
    micro_batches = training.gradient_accumulation_steps
    assert sizes.data_parallel_size * training.batch_size * micro_batches == 32
    assert (training.num_train_steps, training.evaluation_period) == (10 * micro_batches, 2 * micro_batches)
    assert note.startswith(f"distributed.layout: {sizes.data_parallel_size} data x ")
    assert "forecast: " in note


def test_a_fixed_batch_leaves_no_micro_batch_to_choose(run: Path) -> None:
    """Its samples were counted as one each, and the forecast was of other micro-batches than the run's."""
    words = (
        "the search of a layout: the batch of input 'x' is fixed to 16 in training.mapped_dimensions, so no other "
        "micro-batch can be tried. Remove 'batch' there: it follows training.batch_size, or set the sizes in the "
        "section distributed."
    )
    with pytest.raises(ParametersError, match=re.escape(words)):
        resolved(run, training__mapped_dimensions="{batch: 16}")


def test_there_are_no_more_replicas_than_files(run: Path, tmp_path: Path) -> None:
    """Two replicas were chosen for one file, and the run ended with advice that auto refuses."""
    two_ranks = Launch(launcher="torchrun", world_size=2, local_size=2)
    free, note = resolved(run, two_ranks, training__batch_size="1024")
    assert (free.distributed.data_parallel_size, "files" in note) == (2, False)
    asked = {"training__batch_size": "1024", "paths__train_data_dir": str(write_shards(tmp_path / "one", data(8), 1))}
    limited, note = resolved(run, two_ranks, **asked)
    assert (limited.distributed.data_parallel_size, limited.distributed.horizontal_parallel_size) == (1, 2)
    assert note.endswith(
        f"The data directory {str(tmp_path / 'one')!r} holds 1 .pb file, and every data-parallel rank reads its own: "
        "layouts of at most 1 data-parallel rank were searched. For those of up to 2, pack the data again with onward "
        "pack --samples-per-file --overwrite."
    )
    two = str(write_shards(tmp_path / "two", data(8), 2))
    both, note = resolved(run, two_ranks, **asked | {"paths__train_data_dir": two})
    assert (both.distributed, "files" in note) == (free.distributed, False)
    tested = {"paths__train_data_dir": two, "paths__test_data_dir": asked["paths__train_data_dir"]}
    for kind, replicas in (("replicated", 2), ("partitioned", 1)):
        found = resolved(run, two_ranks, **asked | tested, data__test_data=kind)[0]
        assert found.distributed.data_parallel_size == replicas


def record(**changes: Any) -> dict[str, Any]:
    training = {"batch_size": 4, "gradient_accumulation_steps": 4}
    sizes = {"data_parallel_size": 2, "horizontal_parallel_size": 1, "pipeline_parallel_size": 2, "zero_stage": 1}
    sections = {"distributed": {**sizes, "pipeline_schedule": "GPipe"}, "recompute": {"segments": True}}
    return {"parameters": {**sections, "training": training, **changes}}


def test_a_run_resumes_in_the_layout_of_its_checkpoint(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_search, "find_latest", lambda folder: folder / "checkpoint-00000001")
    monkeypatch.setattr(layout_search, "read_record", lambda path: record())
    parameters, note = resolved(run)
    sizes = parameters.distributed
    assert (sizes.data_parallel_size, sizes.pipeline_parallel_size, sizes.zero_stage) == (2, 2, 1)
    assert (sizes.pipeline_schedule, parameters.recompute.segments) == ("GPipe", True)
    assert (parameters.training.batch_size, parameters.training.gradient_accumulation_steps) == (4, 4)
    assert note == "distributed.layout: as in the checkpoint that the run resumes from."
    for other in (record(distributed={"data_parallel_size": 8}), record(training={"batch_size": 3})):
        monkeypatch.setattr(layout_search, "read_record", lambda path, other=other: other)
        assert "forecast: " in resolved(run)[1], "another number of processes or samples is searched anew"


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [("recompute", "segments", True), ("recompute", "memory_budget", 0.5), ("training", "find_batch_size", True)],
)
def test_what_the_user_asks_of_memory_stays_or_is_what_the_search_does(
    run: Path, section: str, name: str, value: Any
) -> None:
    """Recompute is as it is asked for, in all layouts; the micro-batch that fits is part of the layout."""
    parameters, _ = resolved(run, TORCHRUN, **{f"{section}__{name}": str(value).lower()})
    assert getattr(getattr(parameters, section), name) == (value if section == "recompute" else False)
    assert (parameters.recompute.segments, parameters.recompute.memory_budget).count(value) == (section == "recompute")


def test_later_rounds_have_the_mesh_and_as_many_samples_an_update(run: Path) -> None:
    """Also where a round says for itself what is counted in steps."""
    text = run.read_text()
    run.write_text(text + "next_rounds: [{}, {training: {batch_size: 6, num_train_steps: 8}}]\n")
    parameters, _ = resolved(run, distributed__ranks="4")
    same, other = parameters.next_rounds
    assert parameters.distributed == same.distributed == other.distributed
    assert parameters.training == same.training
    replicas, updates = parameters.distributed.data_parallel_size, other.training
    assert replicas * updates.batch_size * updates.gradient_accumulation_steps == 12
    assert updates.batch_size <= parameters.training.batch_size
    assert updates.num_train_steps == 4 * updates.gradient_accumulation_steps
    assert 12 % replicas == 0


def test_the_plan_of_the_chosen_layout_keeps_the_limit(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next is taken where the plan needs more than was counted, or refuses; where all do, so it is reported."""
    first = resolved(run)[0].distributed
    tried: list[tuple[int, int, int, int]] = []

    def needs(parameters: Parameters, *_: Any) -> float:
        one = parameters.distributed
        sizes = (one.data_parallel_size, one.horizontal_parallel_size, one.pipeline_parallel_size, one.zero_stage)
        tried.append(sizes)
        if len(tried) == 1:
            raise ParametersError("no stages can be cut.")
        return 1e12 if len(tried) == 2 else 1e6

    monkeypatch.setattr(layout_search, "peak_bytes", needs)
    parameters, note = resolved(run)
    assert len(tried) == len(set(tried)) == 3
    assert parameters.distributed != first
    assert note.endswith(", 1 MB at peak.")
    monkeypatch.setattr(layout_search, "peak_bytes", lambda *_: 1e12)
    with pytest.raises(
        ParametersError,
        match=r"no layout of 4 ranks fits 76\.2 GB for tensors \(85 GB of a rank, less 6\.8 GB .*\): by its plan, "
        r"the last that could, .*, needs 1e\+03 GB\. Use more ranks",
    ):
        resolved(run)


def test_how_many_processes_there_are(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert resolved(run, Launch(), distributed__ranks="2")[0].distributed.ranks is None
    with pytest.raises(ParametersError, match=r"auto, but nothing says how many processes there are: no launcher"):
        resolved(run, Launch())
    with pytest.raises(ParametersError, match=r"ranks is 3, but torchrun started 4 processes\. Start 3, or remove"):
        resolved(run, distributed__ranks="3")


def test_the_hardware_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores are shared by ranks; a listed GPU is taken as it is listed; what was measured comes first."""
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path))
    monkeypatch.setattr(hardware_here, "usable_cores", lambda: 8)
    with pytest.raises(
        ParametersError, match=r"would choose different layouts\. Run `onward plan --calibrate` once, and"
    ):
        hardware_here.cluster_here(2, "CPU", measures=False)
    rates = hardware_here.rates_of("cpu", 0.01)
    one_core = rates["device"]["operations_per_second"]["fp32"]
    hardware_here.keep_rates("cpu", rates)
    few, many = hardware_here.cluster_here(2, "CPU"), hardware_here.cluster_here(16, "CPU")
    assert few.device.operations_per_second["fp32"] == pytest.approx(4 * one_core)
    assert many.device.operations_per_second["fp32"] == pytest.approx(one_core)
    assert (few.cores, many.cores) == (2, 8)
    assert (few.is_crowded, many.is_crowded) == (False, False)
    crowded = Link(1e8, 1e-3, 5e7, 4e7)
    hardware_here.keep_rates("cpu", hardware_here.rates_of("cpu", 0.01, crowded=crowded))
    few, many = hardware_here.cluster_here(2, "CPU"), hardware_here.cluster_here(16, "CPU")
    assert (few.is_crowded, many.is_crowded) == (False, True)
    assert few.inside != crowded == many.inside == many.between
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert hardware_here.cluster_here(4, None).device.name == "h100"
