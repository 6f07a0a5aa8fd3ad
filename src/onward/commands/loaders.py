"""The data of a run as RUN.yaml names them: loaders of this rank's training and test shards."""

from __future__ import annotations

from pathlib import Path

from onward.data.loader import DataLoader
from onward.errors import ParametersError
from onward.parallel.launch.process import Mesh
from onward.parameters import Parameters


def training_loader(parameters: Parameters, mesh: Mesh) -> DataLoader:
    """The training data of this rank."""
    folder = parameters.paths.train_data_dir
    if folder is None:
        raise ParametersError("paths.train_data_dir is missing; name the folder of the training shards.")
    part = (mesh.place.data, mesh.topology.data_size)
    return _loader(parameters, folder, *part, shuffle=parameters.data.shuffle_data)


def test_loader(parameters: Parameters, mesh: Mesh) -> DataLoader | None:
    """The test data of this rank; None: there are none, or nothing is evaluated."""
    folder = parameters.paths.test_data_dir
    if folder is None or parameters.training.skip_evaluation:
        return None
    is_shared_out = parameters.data.test_data == "partitioned"
    part = (mesh.place.data, mesh.topology.data_size) if is_shared_out else (0, 1)
    return _loader(parameters, folder, *part, shuffle=False)


def _loader(parameters: Parameters, folder: Path, rank: int, size: int, *, shuffle: bool) -> DataLoader:
    data = parameters.data
    return DataLoader(
        data.input_name_map,
        folder,
        data.max_num_files_preload,
        rank,
        size,
        shuffle=shuffle,
        seed=parameters.training.seed,
        last_batch=data.last_batch,
        skip_corrupt=data.skip_corrupt_files,
    )
