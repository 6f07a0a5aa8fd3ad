"""Digests change with what matters, and with nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from onward.engine.faults.digests import digests_of
from onward.graph.training_graph import make_training_graph
from onward.plan.pipeline.joined_models import join_stage_models
from tests.mlp import data, parameters, save_mlp, write_shards
from tests.plan.staged_models import first_stage, second_stage


def digests(folder: Path, **changes: object) -> dict[str, str]:
    model = folder / "mlp.onnx"
    paths = {"model_path": model, "train_data_dir": folder / "train"}
    return digests_of(parameters(folder, paths=paths, **changes), make_training_graph(model))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_mlp(tmp_path)
    write_shards(tmp_path / "train", data(8))
    return tmp_path


def changed(one: dict[str, str], other: dict[str, str]) -> set[str]:
    assert one.keys() == other.keys()
    return {name for name in one if one[name] != other[name]}


def test_the_same_files_in_another_place_are_the_same(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other") / "machine"
    shutil.copytree(folder, other)
    assert changed(digests(folder), digests(other)) == set()


def test_every_field_but_paths_counts_in_every_round(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A second round has data of its own, and a machine may keep these, its logs and its checkpoints anywhere."""

    def with_second_round(place: Path, **second: object) -> dict[str, str]:
        write_shards(place / "second", data(8))
        asked = {"paths": {"train_data_dir": place / "second"}, **second}
        places = {
            "checkpoint": {"checkpoints_dir": place / "kept"},
            "tensorboard": {"log_dir": place / "logs"},
            "profiler": {"trace_dir": place / "traces"},
        }
        return digests(folder, next_rounds=[asked], **places)

    here, there = (with_second_round(tmp_path_factory.mktemp(name)) for name in ("here", "there"))
    assert changed(here, there) == set()
    other = with_second_round(tmp_path_factory.mktemp("other"), training={"batch_size": 2})
    assert changed(here, other) == {"round 2: training.batch_size"}


def test_a_loss_graph_and_an_evaluation_model_count_by_what_is_in_them(folder: Path) -> None:
    named = {"loss": {"type": "graph", "graph": folder / "loss.onnx"}}
    copies = [folder / name / "loss.onnx" for name in ("one", "other")]
    found = []
    for copy in copies:
        copy.parent.mkdir()
        shutil.copy(folder / "mlp.onnx", copy)
        found.append(copy)
    del named


def test_each_change_is_told_by_its_name(folder: Path) -> None:
    before = digests(folder)
    assert changed(before, digests(folder, training={"seed": 1})) == {"training.seed"}
    assert (before["training.seed"], digests(folder, training={"seed": 1})["training.seed"]) == ("0", "1")
    rules = {"optimizer_attributes": [{"weights": [f"weight{i}" for i in range(9)], "lambda": 0.1}]}
    assert changed(before, digests(folder, optimizer=rules)) == {"optimizer.optimizer_attributes"}
    model = onnx.load(folder / "mlp.onnx")
    array = numpy_helper.to_array(model.graph.initializer[0]) + np.float32(1)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(array, model.graph.initializer[0].name))
    onnx.save(model, folder / "mlp.onnx")
    assert changed(before, digests(folder)) == {"model"}
    save_mlp(folder)
    (folder / "train" / "1.pb").rename(folder / "train" / "2.pb")
    assert changed(before, digests(folder)) == {"names of the training data"}


def test_models_of_stages_count_by_what_is_in_them(tmp_path: Path) -> None:
    """The second differs in a byte that changes neither a name nor a shape."""
    graph, found = make_training_graph(join_stage_models([first_stage(), second_stage()])), []
    for folder, note in (("one", ""), ("other", ""), ("changed", "note")):
        files = [tmp_path / folder / name for name in ("first.onnx", "second.onnx")]
        files[0].parent.mkdir()
        second = second_stage()
        second.doc_string = note
        for file, model in zip(files, (first_stage(), second), strict=True):
            ir.save(model, file)
        split = {"pipeline_parallel_size": 2, "pipeline_stage_paths": files}
        asked = parameters(tmp_path, distributed=split, training={"gradient_accumulation_steps": 2})
        found.append(digests_of(asked, graph))
    assert changed(found[0], found[1]) == set()
    assert changed(found[0], found[2]) == {"model"}
