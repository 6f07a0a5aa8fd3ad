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
from tests.mlp import parameters, start

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


def written(memory: RunMemory, number: int) -> Path:
    """The only file of a checkpoint that is complete."""
    save(memory, number)
    assert memory._writer is not None
    memory._writer.wait()
    return memory.root / f"checkpoint-{number:08d}" / "rank-00000.safetensors"


def test_what_is_resumed_from_is_said(settings: Checkpoint, tmp_path: Path) -> None:
    written(memory_of(settings), 4)
    again, said = memory_of(settings), list[str]()
    assert again.find(None, said.append) == again.root / "checkpoint-00000004"
    assert (again.place, said) == ("checkpoint-00000004 in the memory of this node", [])
    into = {"weights/a": ShardedTensor.full(torch.zeros(1000))}
    assert again.read(into, ()) == ()
    assert torch.equal(into["weights/a"].tensor, TENSORS["weights/a"].tensor)


def test_what_is_not_used_is_said(settings: Checkpoint, tmp_path: Path) -> None:
    why = "checkpoint-00000004 in memory is not used: of its 1 files, 1 are on no node, 1 of them damaged."
    written(memory_of(settings), 4).write_bytes(b"damaged")
    said: list[str] = []
    assert memory_of(settings).find(None, said.append) is None
    assert said == [f"{why} Training starts over."]
    written(memory_of(settings), 4).write_bytes(b"damaged")
    assert memory_of(settings).find(tmp_path / "checkpoint-00000003", said.append) is None
    assert said[1:] == [f"{why} Resuming from checkpoint-00000003 on disk."]


def test_a_return_after_a_spike_forgets_what_is_in_memory(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    section = {"checkpoints_dir": tmp_path / "c", "memory_period_updates": 1, "memory_dir": memory}
    runner, recorder = start(tmp_path, checkpoint=section)
    run = runner._initialized()
    run.save()
    run.state.counters.update = 3
    run.save_in_memory()
    run.checkpoints.clear_memory()
    run.save_in_memory()
    assert run.checkpoints._memory is not None
    writer = run.checkpoints._memory._writer
    assert writer is not None
    writer.wait()
    assert [path.name for path in memory.glob("*/checkpoint-*")] == ["checkpoint-00000003"]
    spike: Any = SimpleNamespace(update=2, text="a spike")
    path = run.checkpoints.roll_back(run.parameters.checkpoint, run.state, spike, lambda _: None)
    assert path.name == "checkpoint-00000000"
    assert not list(memory.glob("*/*"))
    assert recorder.messages[-1].startswith("a spike; returned to ")


def test_a_url_is_no_memory(tmp_path: Path) -> None:
    section = {"checkpoints_dir": "c", "memory_period_updates": 1, "memory_dir": Path("s3:/bucket/memory")}
    with pytest.raises(ParametersError) as caught:
        parameters(tmp_path, checkpoint=section)
    assert (
        "checkpoint.memory_dir is s3://bucket/memory, a URL; set it to a folder in the memory of this machine, such "
        "as /dev/shm, or leave it out."
    ) in str(caught.value)
