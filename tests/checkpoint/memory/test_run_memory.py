"""A run's checkpoints in memory: too little memory is refused with numbers, a full one is reported, and nothing is
left at the end."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onward.checkpoint import storage
from onward.checkpoint.memory import run_memory
from onward.checkpoint.memory.run_memory import ID_NAME, RunMemory, newest_here
from onward.checkpoint.run_files import RunFiles
from onward.errors import ParametersError, StorageError
from onward.parallel.launch.process import in_world_of_one
from onward.parallel.sharded_tensors import ShardedTensor
from onward.parameters import Checkpoint
from tests.mlp import parameters

TENSORS = {"weights/a": ShardedTensor.full(torch.arange(1000.0))}


@pytest.fixture
def settings(tmp_path: Path) -> Checkpoint:
    return Checkpoint(checkpoints_dir=tmp_path / "checkpoints", memory_period_updates=1, memory_dir=tmp_path / "memory")


def memory_of(settings: Checkpoint) -> RunMemory:
    return RunMemory(settings, in_world_of_one(), RunFiles())


def save(memory: RunMemory, number: int) -> str | None:
    return memory.save(number, TENSORS, {}, {"data": 0}, disk_sequence=0)


def test_too_little_memory_is_refused_with_numbers(settings: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_memory.shutil, "disk_usage", lambda _: SimpleNamespace(free=7999))
    monkeypatch.setattr(run_memory, "free_memory_bytes", lambda: 50_000.0)
    with pytest.raises(StorageError) as caught:
        memory_of(settings).open(TENSORS)
    assert str(caught.value) == (
        "checkpoint.memory_period_updates: 2 checkpoints in memory need 8,000 bytes on the node of rank 0 (1 rank with "
        f"4,000 bytes, and 0 bytes of copies for another node, each 2 times); {settings.memory_dir} has 7,999 bytes "
        "free, and the machine's memory 46,000. Enlarge that folder or the memory of the container, name another "
        "folder in checkpoint.memory_dir, shard the state (distributed.zero_stage), or leave out "
        "checkpoint.memory_period_updates."
    )


@pytest.mark.parametrize(("free", "is_enough"), [(12_000.0, True), (11_999.0, False)])
def test_memory_of_the_machine_counts(
    settings: Checkpoint, monkeypatch: pytest.MonkeyPatch, free: float, is_enough: bool
) -> None:
    """Two checkpoints, and the copy from which they are written."""
    monkeypatch.setattr(run_memory, "free_memory_bytes", lambda: free)
    if is_enough:
        memory_of(settings).open(TENSORS)
    else:
        with pytest.raises(StorageError, match="the machine's memory 7,999"):
            memory_of(settings).open(TENSORS)


def test_memory_that_fills_up_is_reported_and_training_continues(
    settings: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = memory_of(settings)
    assert save(memory, 1) is None
    assert memory._writer is not None
    memory._writer.wait()
    with monkeypatch.context() as patch:

        def full(*_: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(storage, "_write_bytes", full)
        assert save(memory, 2) is None, "it fails in the background"
        said = save(memory, 3)
    assert said is not None
    assert "checkpoint-00000002 could not be written: No space left on device. 4,000 bytes are needed" in said
    assert "Free some space, or name another disk in checkpoint.memory_dir." in said
    assert said.endswith("Training continues, and the next one is attempted.")
    assert [path.name for path in memory.root.iterdir()] == ["checkpoint-00000001"]
    assert save(memory, 4) is None
    memory.close()
    assert list((settings.memory_dir or Path()).iterdir()) == []


def test_the_folder_of_checkpoints_says_which_memory_is_its_own(settings: Checkpoint) -> None:
    assert settings.checkpoints_dir is not None
    first = memory_of(settings).root
    assert memory_of(settings).root == first
    shutil.rmtree(settings.checkpoints_dir)
    assert memory_of(settings).root != first, "a run that starts over does not resume from what was before it"
    (settings.checkpoints_dir / ID_NAME).write_text("../../elsewhere")
    assert memory_of(settings).root.parent == settings.memory_dir


def test_the_newest_on_this_machine_is_found_for_a_launcher(settings: Checkpoint) -> None:
    assert newest_here(settings) is None
    memory = memory_of(settings)
    save(memory, 3)
    memory.clear()
    assert newest_here(settings) is None
    save(memory, 4)
    assert memory._writer is not None
    memory._writer.wait()
    assert newest_here(settings) == memory.root / "checkpoint-00000004"
    memory.close()


def test_a_url_is_no_memory(tmp_path: Path) -> None:
    section = {"checkpoints_dir": "c", "memory_period_updates": 1, "memory_dir": Path("s3:/bucket/memory")}
    with pytest.raises(ParametersError) as caught:
        parameters(tmp_path, checkpoint=section)
    assert (
        "checkpoint.memory_dir is s3://bucket/memory, a URL; set it to a folder in the memory of this machine, such "
        "as /dev/shm, or leave it out."
    ) in str(caught.value)
