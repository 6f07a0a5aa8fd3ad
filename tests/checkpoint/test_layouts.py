"""A checkpoint of any layout loads into any other one bit for bit, on as many ranks as that has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from onward.checkpoint.manifest import read_manifest
from onward.checkpoint.reading import read_new_tensors, read_record, read_sharded_tensors, verify
from onward.checkpoint.stored_tensors import StoredShard
from onward.checkpoint.writing import CheckpointWriter
from onward.errors import CheckpointError
from onward.parallel.sharded_tensors import ShardedTensor
from tests.checkpoint.contents import same
from tests.checkpoint.layouts import LAYOUTS, full_tensors, fused_on_2, rows_on_2, stages_on_3
from tests.ranks import run_on_ranks


def on_ranks(layout: str, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function` on as many ranks as a layout has, one of them in this process."""
    size, _ = LAYOUTS[layout]
    return [function(*arguments)] if size == 1 else run_on_ranks(size, function, *arguments)


def group_and_rank() -> tuple[dist.ProcessGroup | None, int]:
    return (dist.group.WORLD, dist.get_rank()) if dist.is_initialized() else (None, 0)


def save_layout(layout: str, directory: Path, blocking: bool) -> None:
    group, rank = group_and_rank()
    tensors = LAYOUTS[layout][1](rank)
    with CheckpointWriter(directory, 2, blocking, group) as writer:
        writer.save(1, tensors, {"update": 1}, None if group is None else {"cursor": rank * 10})
        for sharded in tensors.values():
            sharded.tensor.zero_()


def load_layouts(layout: str, directories: dict[str, Path]) -> list[str]:
    """The names that did not come back bit for bit."""
    group, rank = group_and_rank()
    wrong = []
    for source, directory in directories.items():
        expected = LAYOUTS[layout][1](rank)
        into = LAYOUTS[layout][1](rank)
        for sharded in into.values():
            sharded.tensor.zero_()
        missing = read_sharded_tensors(directory / "checkpoint-00000001", into, group=group)
        wrong += [
            f"{source} -> {layout}: {name}" for name in into if not same(into[name].tensor, expected[name].tensor)
        ]
        wrong += missing
    return wrong


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of every layout, by its name."""
    folder = tmp_path_factory.mktemp("saved")
    directories = {layout: folder / layout for layout in LAYOUTS}
    for number, (layout, directory) in enumerate(directories.items()):
        on_ranks(layout, save_layout, layout, directory, number % 2 == 1)
    return directories


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_loads_every_other(saved: dict[str, Path], layout: str) -> None:
    assert on_ranks(layout, load_layouts, layout, saved) == [[]] * LAYOUTS[layout][0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_process_reads_the_whole_of_every_layout(saved: dict[str, Path], layout: str) -> None:
    """Each rank wrote a file, or none where it had nothing to write; records of ranks are next to the run's."""
    path = saved[layout] / "checkpoint-00000001"
    size = LAYOUTS[layout][0]
    read, expected = read_new_tensors(path), full_tensors()
    assert set(read) == set(expected)
    assert [name for name in expected if not same(read[name], expected[name])] == []
    ranks = {str(rank): {"cursor": rank * 10} for rank in range(size)}
    assert read_record(path) == ({"update": 1} if size == 1 else {"update": 1, "ranks": ranks})
    writing = [0, 2] if layout == "stages on 3" else list(range(size))
    assert [entry.name for entry in verify(path).files] == [f"rank-{rank:05d}.safetensors" for rank in writing]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_written_twice(saved: dict[str, Path], layout: str) -> None:
    """The safetensors library, which is not ours, counts the elements in the files."""
    safetensors = pytest.importorskip("safetensors.torch")
    files = (saved[layout] / "checkpoint-00000001").glob("*.safetensors")
    held = sum(tensor.numel() for file in files for tensor in safetensors.load_file(file).values())
    assert held == sum(tensor.numel() for tensor in full_tensors().values())


@pytest.mark.parametrize("layout", ["one", "rows on 2", "zero on 3", "stages on 3"])
def test_torch_reads_what_has_one_box_a_rank(saved: dict[str, Path], layout: str) -> None:
    """torch's own reader of safetensors checkpoints puts the full tensors together."""
    expected = full_tensors()
    read = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    load(read, storage_reader=HuggingFaceStorageReader(str(saved[layout] / "checkpoint-00000001")), no_dist=True)
    assert [name for name in expected if not same(read[name], expected[name])] == []


def test_torch_misses_a_tensor_in_several_boxes_rather_than_reading_a_part(saved: dict[str, Path]) -> None:
    read = {"weights/qkv": torch.zeros(4, 12)}
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: weights/qkv\."):
        load(
            read,
            storage_reader=HuggingFaceStorageReader(str(saved["fused on 2"] / "checkpoint-00000001")),
            no_dist=True,
        )


def test_a_rank_reads_no_more_than_its_boxes(saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    read_bytes = 0
    original = StoredShard.read

    def counted(self: StoredShard, slices: tuple[slice, ...]) -> torch.Tensor:
        nonlocal read_bytes
        part = original(self, slices)
        read_bytes += part.nbytes
        return part

    monkeypatch.setattr(StoredShard, "read", counted)
    tensors = fused_on_2(1)
    read_sharded_tensors(saved["mixed on 4"] / "checkpoint-00000001", tensors)
    assert read_bytes == sum(sharded.tensor.nbytes for sharded in tensors.values())


def test_format_version_1_is_still_read(tmp_path: Path) -> None:
    """A checkpoint of one process is the same in both versions, but for the number and the manifest's own checksum,
    which does not cover it."""
    tensors = full_tensors()
    with CheckpointWriter(tmp_path, 1) as writer:
        path = writer.save(1, tensors, {})
    manifest = path / "manifest.json"
    document = json.loads(manifest.read_text())
    assert document["version"] == 2
    manifest.write_text(json.dumps(document | {"version": 1}))
    read = read_new_tensors(path)
    assert [name for name in tensors if not same(read[name], tensors[name])] == []


# ---------------------------------------------------------------------- names over all ranks


def load_another_model(directory: Path) -> tuple[str, bool]:
    """Stage 2 of the pipeline has one weight of another shape, and stage 0 has one too many."""
    tensors = stages_on_3(dist.get_rank(), seed=1)
    if dist.get_rank() == 0:
        tensors["weights/new"] = ShardedTensor.full(torch.ones(3))
    if dist.get_rank() == 2:
        tensors["weights/bias"] = ShardedTensor.full(torch.ones(8, dtype=torch.float64))
    before = {name: sharded.tensor.clone() for name, sharded in tensors.items()}
    try:
        read_sharded_tensors(directory / "checkpoint-00000001", tensors, group=dist.group.WORLD)
    except CheckpointError as error:
        return str(error), all(same(before[name], tensors[name].tensor) for name in tensors)
    return "", False


def test_names_are_compared_over_all_ranks_before_a_value_changes(saved: dict[str, Path]) -> None:
    results = run_on_ranks(3, load_another_model, saved["zero on 3"])
    assert len({text for text, _ in results}) == 1
    assert all(unchanged for _, unchanged in results)
    assert (
        "1 of another shape or type: weights/bias float64 [7] in the checkpoint, float64 [8] in this run; 1 in this "
        "run only: weights/new float32 [3]. Load it with the model"
    ) in results[0][0]


def load_damaged(directory: Path) -> tuple[str, bool]:
    tensors = rows_on_2(dist.get_rank(), seed=1)
    before = {name: sharded.tensor.clone() for name, sharded in tensors.items()}
    try:
        read_sharded_tensors(directory / "checkpoint-00000001", tensors, group=dist.group.WORLD)
    except CheckpointError as error:
        return str(error), all(same(before[name], tensors[name].tensor) for name in tensors)
    return "", False


def test_a_damaged_file_is_told_on_every_rank(saved: dict[str, Path], tmp_path: Path) -> None:
    """The files are sharded among the ranks for checking: the damaged one is rank 1's share."""
    save_to = tmp_path / "checkpoints"
    run_on_ranks(2, save_layout, "rows on 2", save_to, True)
    data = save_to / "checkpoint-00000001" / "rank-00001.safetensors"
    data.write_bytes(data.read_bytes()[:-1] + b"\x55")
    results = run_on_ranks(2, load_damaged, save_to)
    assert [unchanged for _, unchanged in results] == [True, True]
    assert results[0][0] == results[1][0]
    assert results[0][0].startswith(f"rank 1: the checkpoint {data.parent} is damaged: {data} has the SHA-256 ")


# ---------------------------------------------------------------------- what belongs to a layout


def with_random_states(tensors: dict[str, ShardedTensor], rank: int, value: int) -> dict[str, ShardedTensor]:
    return tensors | {f"random/{rank}/cpu": ShardedTensor.full(torch.full((4,), value, dtype=torch.uint8))}


def save_with_random_states(directory: Path) -> None:
    rank = dist.get_rank()
    with CheckpointWriter(directory, 1, group=dist.group.WORLD) as writer:
        writer.save(1, with_random_states(rows_on_2(rank), rank, 7 + rank), {})


def test_random_states_of_other_ranks_may_be_lacking_on_either_side(tmp_path: Path) -> None:
    """Saved by ranks 0 and 1. Rank 0 alone finds its own; a rank 5 finds none, keeps what it has, and reports it."""
    run_on_ranks(2, save_with_random_states, tmp_path)
    path = tmp_path / "checkpoint-00000001"
    tensors = with_random_states(LAYOUTS["one"][1](0), 0, 0)
    assert read_sharded_tensors(path, tensors, optional=("random/",)) == ()
    assert tensors["random/0/cpu"].tensor.tolist() == [7] * 4
    tensors = with_random_states(LAYOUTS["one"][1](0), 5, 3)
    assert read_sharded_tensors(path, tensors, optional=("random/",)) == ("random/5/cpu",)
    assert tensors["random/5/cpu"].tensor.tolist() == [3] * 4
    with pytest.raises(
        CheckpointError, match=r"2 in the checkpoint only: random/0/cpu .*; 1 in this run only: random/5"
    ):
        read_sharded_tensors(path, tensors)
    assert set(read_manifest(path).tensors) - set(full_tensors()) == {"random/0/cpu", "random/1/cpu"}
