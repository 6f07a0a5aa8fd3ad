"""The data of a run as RUN.yaml names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from onward.commands import loaders
from onward.commands.loaders import training_loader
from onward.data.in_memory import InMemoryDataLoader
from onward.data.loader import DataLoader
from onward.data.packing import PackOptions, pack
from onward.errors import DataError, ParametersError
from onward.parallel.launch.process import in_world_of_one
from onward.parameters import Parameters
from tests.mlp import write_shards

ROWS = {"x": np.zeros((6, 2), np.float32), "label": np.arange(6)}


def parameters(folder: Path | None, **sections: dict[str, Any]) -> Parameters:
    paths = {} if folder is None else {"train_data_dir": folder / "train", "test_data_dir": folder / "test"}
    mapping = {
        "paths": {"model_path": "m.onnx", **paths}, "loss": {"type": "output", "prediction": "y"},
        "training": {"batch_size": 1, "num_train_steps": 1}, "learning_rate": {"initial_lr": 1.0},
    }  # fmt: skip
    return Parameters.from_mapping(
        {name: {**mapping.get(name, {}), **sections.get(name, {})} for name in {**mapping, **sections}}
    )


def test_folders_and_names(tmp_path: Path) -> None:
    for name in ("train", "test"):
        write_shards(tmp_path / name, ROWS)
    asked = parameters(tmp_path, data={"input_name_map": {"label": "y"}})
    mesh = in_world_of_one()
    for loader in (training_loader(asked, mesh), loaders.test_loader(asked, mesh)):
        assert loader is not None
        with loader:
            assert set(loader.feature_specs()) == {"x", "y"}
            assert loader.sample_count == 6
    assert InMemoryDataLoader(ROWS).sample_count == 6


def test_what_is_not_there() -> None:
    mesh = in_world_of_one()
    with pytest.raises(ParametersError, match=r"paths\.train_data_dir is missing; name the folder of the training"):
        training_loader(parameters(None), mesh)
    assert loaders.test_loader(parameters(None), mesh) is None


def test_nothing_is_opened_that_is_not_evaluated(tmp_path: Path) -> None:
    asked = parameters(tmp_path, training={"skip_evaluation": True})
    assert loaders.test_loader(asked, in_world_of_one()) is None


def test_classes_of_all_rounds_are_compared_before_the_first(tmp_path: Path) -> None:
    loaded = {}
    for name, classes in (("train", "abc"), ("fewer", "ab"), ("other", "bc")):
        source = tmp_path / f"{name}_in"
        for one in classes:
            (source / one).mkdir(parents=True)
            Image.new("L", (2, 2)).save(source / one / "1.png")
        pack(source, tmp_path / name, PackOptions(progress=False))
        loaded[name] = DataLoader({}, tmp_path / name)
    loaders.check_numbering_of_rounds([(loaded["train"], loaded["fewer"]), (loaded["fewer"], None)])
    for rounds in ([("train", "other")], [("train", None), ("fewer", "other")]):
        pairs = [(loaded[one], loaded.get(two)) for one, two in rounds]
        with pytest.raises(
            DataError, match=r"classes have other numbers in '.*other' than in '.*train', from number 0"
        ):
            loaders.check_numbering_of_rounds(pairs)
