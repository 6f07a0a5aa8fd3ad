"""Every path of a RUN.yaml spoiled in every way: exit code 2 with the field, the path and what to do, or it is fine."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import yaml

from onward.cli import main
from onward.commands.path_fields import naming_path_fields
from onward.engine.building.preparation import read_training_graph
from onward.errors import UserError
from onward.parameters import Parameters
from tests.losses.test_dpo import model as model_of_words
from tests.mlp import CROSS_ENTROPY, data, parameters, save_mlp, write_shards


def _fields() -> list[str]:
    """`section.field` of all fields that hold paths."""
    found = []
    for section, kind in typing.get_type_hints(Parameters).items():
        if dataclasses.is_dataclass(kind):
            types = typing.get_type_hints(kind)
            found += [f"{section}.{one.name}" for one in dataclasses.fields(kind) if "Path" in str(types[one.name])]
    return found


FIELDS = _fields()
# What a run only writes there is made, or written over.
WRITTEN = {
    "paths.model_with_loss_func_path": "file",
    "paths.model_with_training_graph_path": "file",
    "paths.optimizer_graph_path": "file",
    "paths.output_dir": "folder",
    "checkpoint.checkpoints_dir": "folder",
    "checkpoint.memory_dir": "folder",
    "tensorboard.log_dir": "folder",
    "profiler.trace_dir": "folder",
}
BESIDE: dict[str, dict[str, Any]] = {
    "checkpoint.memory_dir": {"checkpoint": {"memory_period_updates": 1, "checkpoints_dir": "saved"}},
    "profiler.trace_dir": {"profiler": {"first_step": 1, "last_step": 1}},
    "loss.graph": {"loss": {"type": "graph"}},
    "loss.reference_model_path": {
        "paths": {"model_path": "words.onnx", "train_data_dir": "train"},
        "loss": {"type": "dpo", "prediction": "logits", "label": "labels"},
    },
    "adapter.start_path": {"adapter": {"rank": 2, "targets": ["*"]}},
}
TWO_PROCESSES = "distributed.pipeline_stage_paths"


def _missing(_: Path) -> None:
    """Nothing is there."""


def _folder(path: Path) -> None:
    path.mkdir()


def _file(path: Path) -> None:
    path.write_text("no model")


def _folder_of_other_files(path: Path) -> None:
    path.mkdir()
    for name in ("0.pb", "manifest.json", "model.onnx"):
        (path / name).write_text("{")


def _unreadable(path: Path) -> None:
    path.write_text("closed")
    path.chmod(0)


SPOILS: dict[str, Callable[[Path], None]] = {
    "missing": _missing,
    "folder": _folder,
    "file": _file,
    "folder of other files": _folder_of_other_files,
    "unreadable": _unreadable,
}


def test_the_fields_are_those_that_the_table_of_written_ones_knows() -> None:
    assert set(WRITTEN) < set(FIELDS)
    assert {"paths.model_path", "paths.eval_model_path", "loss.graph", TWO_PROCESSES} <= set(FIELDS)


@pytest.mark.parametrize(("field", "spoil"), list(itertools.product(FIELDS, SPOILS)))
def test_a_spoiled_path(field: str, spoil: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if spoil == "unreadable" and os.geteuid() == 0:
        pytest.skip("root reads every file")
    if field == TWO_PROCESSES:
        _check_stages(spoil, tmp_path)
        return
    save_mlp(tmp_path)
    ir.save(model_of_words(), tmp_path / "words.onnx")
    for name in ("train", "test"):
        write_shards(tmp_path / name, data(8))
    run: dict[str, Any] = {
        "paths": {"model_path": "mlp.onnx", "train_data_dir": "train", "test_data_dir": "test"},
        "loss": dict(CROSS_ENTROPY),
        "training": {"batch_size": 4, "num_train_steps": 1},
        "learning_rate": {"initial_lr": 0.1},
        "machine": {"execution_provider": "CPU"},
        **BESIDE.get(field, {}),
    }
    section, name = field.split(".")
    run.setdefault(section, {})[name] = "deep/spoiled" if spoil == "missing" else "spoiled"
    SPOILS[spoil](tmp_path / "spoiled")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    code = main(["train", str(tmp_path / "run.yaml")])
    shown = capsys.readouterr().err
    if _is_fine(field, spoil):
        assert (code, shown) == (0, "")
        return
    assert code == 2, shown
    assert field in shown
    assert "spoiled" in shown
    assert re.search(r"\b(Give|give|Name|name|Choose|correct|Copy|copy|write)\b", shown), shown


def _is_fine(field: str, spoil: str) -> bool:
    wanted = WRITTEN.get(field)
    if wanted == "folder":
        return spoil in ("missing", "folder", "folder of other files")
    return wanted == "file" and spoil in ("missing", "file", "unreadable")


def _check_stages(spoil: str, folder: Path) -> None:
    """A run through a pipeline starts processes; the files are read here as each of them reads them."""
    SPOILS[spoil](folder / "spoiled")
    stages = [save_mlp(folder), folder / "spoiled"]
    split = {"pipeline_parallel_size": 2, "pipeline_stage_paths": stages}
    training = {"gradient_accumulation_steps": 2}
    asked = parameters(folder, paths={"model_path": None}, training=training, distributed=split)
    with pytest.raises(UserError, match="spoiled") as caught, naming_path_fields(asked):
        read_training_graph(asked)
    assert TWO_PROCESSES in "".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


@pytest.mark.parametrize(
    ("text", "is_about_it"),
    [
        ("the data have no feature 'tokens'", False),
        ("data.input_name_map names 'x'", False),
        ("no shards in 'data'", True),
        ("data/part-1.pb is corrupt", True),
        ("old/data/part-1.pb is corrupt", False),
    ],
)
def test_a_folder_whose_name_is_a_word_is_not_every_such_word(tmp_path: Path, text: str, is_about_it: bool) -> None:
    given = parameters(tmp_path)
    given = dataclasses.replace(given, paths=dataclasses.replace(given.paths, train_data_dir=Path("data")))
    with pytest.raises(UserError) as caught, naming_path_fields(given):
        raise UserError(text)
    notes = getattr(caught.value, "__notes__", [])
    assert notes == (["The path is set by paths.train_data_dir; correct it there."] if is_about_it else [])
