"""The data of a run as RUN.yaml names them: loaders of this rank's training and test shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onward.data.loader import DataLoader
from onward.data.numbering import check_same_numbering
from onward.errors import ParametersError
from onward.parallel.launch.process import Mesh
from onward.parameters import Parameters


def training_loader(parameters: Parameters, mesh: Mesh | None = None) -> DataLoader:
    """The training data of this rank, or all of them without a mesh.

    Raises:
        ParametersError: the run names none.
        DataError: they are not there or broken.
    """
    folder = parameters.paths.train_data_dir
    if folder is None:
        raise ParametersError("paths.train_data_dir is missing; name the folder of the training shards.")
    return _loader(parameters, folder, mesh, shuffle=parameters.data.shuffle_data)


def test_loader(parameters: Parameters, mesh: Mesh) -> DataLoader | None:
    """The test data of this rank; None: there are none, or nothing is evaluated."""
    folder = parameters.paths.test_data_dir
    if folder is None or parameters.training.skip_evaluation:
        return None
    return _loader(parameters, folder, mesh if parameters.data.test_data == "partitioned" else None, shuffle=False)


def check_numbering_of_rounds(loaders: Sequence[tuple[DataLoader, DataLoader | None]]) -> None:
    """Refuses, before the first round, data of any round whose classes or tokens have other numbers than the first's.

    Args:
        loaders: of training and test data, of each round.

    Raises:
        DataError: as of `check_same_numbering`.
    """
    first, *others = [one for pair in loaders for one in pair if one is not None]
    if first.numbering is None:
        return
    for other in others:
        if other.numbering is not None:
            check_same_numbering(first.numbering, other.numbering)


def _loader(parameters: Parameters, folder: Path, mesh: Mesh | None, *, shuffle: bool) -> DataLoader:
    data = parameters.data
    return DataLoader(
        data.input_name_map,
        folder,
        data.max_num_files_preload,
        0 if mesh is None else mesh.reader,
        1 if mesh is None else mesh.topology.reader_count,
        shuffle=shuffle,
        seed=parameters.training.seed,
        last_batch=data.last_batch,
        skip_corrupt=data.skip_corrupt_files,
    )
