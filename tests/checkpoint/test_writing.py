"""Saving: what returns is what was given, asynchronously as well as not, and a failed save harms nothing."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from onward.checkpoint import reading, storage, writing
from onward.checkpoint.reading import find_latest, read_record, read_tensors, verify
from onward.checkpoint.writing import CheckpointWriter
from onward.errors import ParametersError, StorageError
from onward.retries import RETRY_VARIABLE
from tests.checkpoint.contents import RECORD, every_kind, same, zeros_like


def save(directory: Path, number: int, tensors: dict[str, torch.Tensor], **options: object) -> Path:
    with CheckpointWriter(directory, 3, **options) as writer:  # type: ignore[arg-type]
        return writer.save(number, tensors, RECORD)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("blocking", [True, False])
def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path: Path, blocking: bool) -> None:
    """Every dtype, 0-d, empty, strided and tied tensors, under names with any character; the record too."""
    tensors = every_kind()
    path = save(tmp_path, 7, tensors, blocking=blocking)
    assert path == tmp_path / "checkpoint-00000007"
    into = zeros_like(tensors)
    read_tensors(path, into)
    assert [name for name in tensors if not same(tensors[name], into[name])] == []
    assert read_record(path) == RECORD


def test_asynchronous_and_blocking_saves_write_the_same_bytes(tmp_path: Path) -> None:
    first = save(tmp_path / "a", 1, every_kind(), blocking=True)
    second = save(tmp_path / "b", 1, every_kind(), blocking=False)
    assert names(first) == names(second) == ["manifest.json", "rank-00000.safetensors"]
    for name in names(first):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_the_file_is_an_ordinary_safetensors_file(tmp_path: Path) -> None:
    """The safetensors library, which is not ours, reads the file and finds the same values."""
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = every_kind()
    path = save(tmp_path, 1, tensors)
    read = safetensors.load_file(path / "rank-00000.safetensors")
    assert set(read) == set(tensors)
    assert all(same(tensors[name], read[name]) for name in tensors)


def test_the_checksums_are_those_of_sha256sum(tmp_path: Path) -> None:
    """A user can check a checkpoint without onward."""
    path = save(tmp_path, 1, every_kind())
    entry = verify(path).files[0]
    printed = subprocess.run(["sha256sum", path / entry.name], capture_output=True, text=True, check=True).stdout
    assert printed.split()[0] == entry.sha256


def test_changes_right_after_save_do_not_reach_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write is held back until tensors and record have been changed; the file holds the values of the save."""
    changed = threading.Event()
    original = storage._write_file

    def held_back(*arguments: object) -> object:
        assert changed.wait(10)
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(storage, "_write_file", held_back)
    tensors = {name: tensor for name, tensor in every_kind().items() if name != "weights/expanded"}
    expected = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    record = {"update": 1, "cursor": {"file": 3}}
    with CheckpointWriter(tmp_path, 1) as writer:
        path = writer.save(1, tensors, record)
        assert not path.exists()
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.zero_()
        record["cursor"]["file"] = 99  # type: ignore[index]
        changed.set()
    into = zeros_like(expected)
    read_tensors(path, into)
    assert all(same(expected[name], into[name]) for name in expected)
    assert read_record(path) == {"update": 1, "cursor": {"file": 3}}


def test_the_oldest_goes_only_after_the_new_one_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of what reaches the disk: data, manifest, their directory, the name, its directory, then removal."""
    save(tmp_path, 1, every_kind(), blocking=True)
    events: list[str] = []

    def note(module: object, name: str, describe: object) -> None:
        original = getattr(module, name)

        def noted(*arguments: object, **options: object) -> object:
            events.append(describe(*arguments))  # type: ignore[operator]
            return original(*arguments, **options)

        monkeypatch.setattr(module, name, noted)

    def target(descriptor: int) -> str:
        return "sync " + os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path)

    note(os, "fsync", target)
    note(os, "rename", lambda a, b: f"rename {Path(a).name} {Path(b).name}")
    note(shutil, "rmtree", lambda path, **_: f"remove {Path(path).name}")
    with CheckpointWriter(tmp_path, 1) as writer:
        events.clear()
        writer.save(2, every_kind(), {})
    assert events == [
        "sync .tmp-onward-checkpoint-00000002/rank-00000.safetensors",
        "sync .tmp-onward-checkpoint-00000002/manifest.json",
        "sync .tmp-onward-checkpoint-00000002",
        "rename .tmp-onward-checkpoint-00000002 checkpoint-00000002",
        "sync .",
        "rename checkpoint-00000001 .tmp-onward-removed-checkpoint-00000001",
        "sync .",
        "remove .tmp-onward-removed-checkpoint-00000001",
    ]


def test_retention_keeps_the_newest_saves(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, 2) as writer:
        for number in (10, 20, 30, 40):
            writer.save(number, {"w": torch.ones(2)}, {})
    assert names(tmp_path) == ["checkpoint-00000030", "checkpoint-00000040"]


def test_a_run_that_went_back_keeps_and_finds_its_own_saves(tmp_path: Path) -> None:
    """Newest means saved last: after going back from update 40 to 30, the save of update 35 is the latest."""
    with CheckpointWriter(tmp_path, 2) as writer:
        for number in (30, 40, 35):
            writer.save(number, {"w": torch.ones(2)}, {})
    assert names(tmp_path) == ["checkpoint-00000035", "checkpoint-00000040"]
    assert find_latest(tmp_path) == tmp_path / "checkpoint-00000035"


def test_the_same_number_is_replaced_as_a_whole(tmp_path: Path) -> None:
    save(tmp_path, 5, {"old": torch.zeros(3)})
    path = save(tmp_path, 5, {"new": torch.ones(4)})
    assert names(tmp_path) == ["checkpoint-00000005"]
    into = {"new": torch.zeros(4)}
    read_tensors(path, into)
    assert into["new"].tolist() == [1, 1, 1, 1]


def test_a_replacement_interrupted_between_its_renames_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rename to the final name fails: the old checkpoint still counts and gets its name back at the next start."""
    save(tmp_path, 5, {"w": torch.zeros(3)})
    original = os.rename

    def failing(source: Path, destination: Path) -> None:
        if destination.name == "checkpoint-00000005":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        original(source, destination)

    monkeypatch.setattr(os, "rename", failing)
    monkeypatch.setenv(RETRY_VARIABLE, "0")
    with pytest.raises(StorageError, match="Input/output error"):
        save(tmp_path, 5, {"w": torch.ones(3)})
    monkeypatch.undo()
    assert names(tmp_path) == [".replaced-checkpoint-00000005"]
    latest = find_latest(tmp_path)
    assert latest is not None
    assert reading.checkpoint_number(latest) == 5
    verify(latest)
    CheckpointWriter(tmp_path, 1).close()
    assert names(tmp_path) == ["checkpoint-00000005"]
    into = {"w": torch.ones(3)}
    read_tensors(tmp_path / "checkpoint-00000005", into)
    assert into["w"].tolist() == [0, 0, 0]


def test_leftovers_of_a_killed_save_are_cleared(tmp_path: Path) -> None:
    kept = save(tmp_path, 5, {"w": torch.zeros(3)})
    shutil.copytree(kept, tmp_path / ".tmp-onward-checkpoint-00000006")
    shutil.copytree(kept, tmp_path / ".tmp-onward-removed-checkpoint-00000004")
    shutil.copytree(kept, tmp_path / ".replaced-checkpoint-00000005")
    (tmp_path / ".tmp-file").write_text("another program's")
    (tmp_path / "notes.txt").write_text("the user's own")
    CheckpointWriter(tmp_path, 1).close()
    assert names(tmp_path) == [".tmp-file", "checkpoint-00000005", "notes.txt"]


def test_only_one_save_is_in_flight_and_the_stall_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second save waits for the first, which is held for 0.3 s; the first returned at once."""
    original = storage._write_file
    running = threading.Semaphore(1)

    def slow(*arguments: object) -> object:
        assert running.acquire(blocking=False)
        threading.Event().wait(0.3)
        entry = original(*arguments)  # type: ignore[arg-type]
        running.release()
        return entry

    monkeypatch.setattr(storage, "_write_file", slow)
    with CheckpointWriter(tmp_path, 2) as writer:
        first = writer.save(1, {"w": torch.ones(3)}, {})
        assert writer.stall_seconds < 0.2
        writer.save(2, {"w": torch.ones(3)}, {})
        assert first.exists()
        assert writer.stall_seconds > 0.1


def test_a_full_disk_is_told_and_earlier_checkpoints_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills up in the middle of the data: the error surfaces once, at the next save; then all is as before."""
    tensors = {"w": torch.zeros(1000), "v": torch.zeros(1000)}
    kept = save(tmp_path, 1, tensors)
    original = storage._write_bytes
    written = []

    def filling(stream: object, content: memoryview, digest: object) -> int:
        written.append(len(content))
        if len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(stream, content, digest)  # type: ignore[arg-type]

    with CheckpointWriter(tmp_path, 1) as writer:
        monkeypatch.setattr(storage, "_write_bytes", filling)
        path = writer.save(2, tensors, {})
        with pytest.raises(StorageError) as error:
            writer.save(3, tensors, {})
        monkeypatch.undo()
        assert names(tmp_path) == ["checkpoint-00000001"]
        verify(kept)
        writer.save(4, tensors, {})
    assert names(tmp_path) == ["checkpoint-00000004"]
    text = str(error.value)
    assert text.startswith(f"{path} could not be written: No space left on device. 8,000 bytes are needed, ")
    assert " bytes are free on its file system. Free some space, or name another disk in checkpoint.check" in text
    assert text.endswith("Checkpoints completed earlier are intact.")


def test_a_limit_on_file_sizes_is_reported(tmp_path: Path) -> None:
    """A real refusal by the kernel in the middle of a file (RLIMIT_FSIZE), at close."""
    kept = save(tmp_path, 1, {"w": torch.zeros(10)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        writer = CheckpointWriter(tmp_path, 1)
        writer.save(2, {"w": torch.zeros(100_000)}, {})
        with pytest.raises(StorageError, match=r"File too large.*400,000 bytes are needed.*ulimit -f"):
            writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path) == [kept.name]
    verify(kept)


@pytest.fixture
def small_disk(tmp_path: Path) -> object:
    """A file system of 256 KiB, where the machine lets us mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system is not allowed here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_really_full_file_system_is_told_and_recovered_from(small_disk: Path) -> None:
    kept = save(small_disk / "checkpoints", 1, {"w": torch.zeros(30_000)})
    with pytest.raises(StorageError, match=r"No space left on device.*160,000 bytes are needed, [\d,]+ bytes are free"):
        save(small_disk / "checkpoints", 2, {"w": torch.zeros(40_000)})
    assert names(small_disk / "checkpoints") == [kept.name]
    verify(kept)
    save(small_disk / "checkpoints", 3, {"w": torch.zeros(20_000)})
    assert names(small_disk / "checkpoints") == [kept.name, "checkpoint-00000003"]


def test_a_directory_that_cannot_be_made_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match=r"file/checkpoints could not be prepared for checkpoints: Not a directory"):
        CheckpointWriter(tmp_path / "file" / "checkpoints", 1)
    with pytest.raises(
        StorageError, match=r"file could not be prepared.*Name a directory in checkpoint.checkpoints_di"
    ):
        CheckpointWriter(tmp_path / "file", 1)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "there")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StorageError, match=r"Permission denied \(there\).*Get write permission there"):
        CheckpointWriter(tmp_path / "new", 1)


def test_an_old_checkpoint_that_cannot_be_removed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, {"w": torch.zeros(3)})

    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(writing, "remove", refuse)
    with pytest.raises(StorageError, match=r"checkpoint-00000001 could not be removed.*Read-only file system"):  # noqa: SIM117
        with CheckpointWriter(tmp_path, 1) as writer:
            writer.save(2, {"w": torch.zeros(3)}, {})
    verify(tmp_path / "checkpoint-00000002")


def test_keeping_no_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParametersError, match=r"checkpoint.max_num_checkpoints is 0, expected at least 1"):
        CheckpointWriter(tmp_path, 0)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"a": {"b": [1, object()]}}, r"record\['a'\]\['b'\]\[1\] is a builtins.object; expected a plain JSON value"),
        ({"a": {1: 2}}, r"record\['a'\] has the key 1 of type int; expected a str"),
        ({"t": torch.ones(1)}, r"record\['t'\] is a torch.Tensor"),
    ],
)
def test_a_record_that_json_would_change_is_refused(tmp_path: Path, record: dict[str, object], words: str) -> None:
    with CheckpointWriter(tmp_path, 1) as writer, pytest.raises(TypeError, match=words):
        writer.save(1, {}, record)  # type: ignore[arg-type]
    assert names(tmp_path) == []


def test_a_record_returns_exactly(tmp_path: Path) -> None:
    """Floats to the last bit, the whole of a 128-bit integer, infinities, and an empty set of tensors."""
    record = {
        "lr": 0.1 + 0.2,
        "tiny": 5e-324,
        "seed": 2**127 + 1,
        "bound": float("inf"),
        "list": [1, [], {}],
        "é": "漢",
    }
    with CheckpointWriter(tmp_path, 1) as writer:
        path = writer.save(1, {}, record)
    assert read_record(path) == record
    read_tensors(path, {})


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"__metadata__": torch.ones(1)}, "cannot be named '__metadata__'"),
        ({"\ud800": torch.ones(1)}, "not valid Unicode"),
        ({"c": torch.ones(1, dtype=torch.complex128)}, "tensor 'c' is of torch.complex128"),
    ],
)
def test_what_a_safetensors_file_cannot_hold_is_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], words: str
) -> None:
    with CheckpointWriter(tmp_path, 1) as writer, pytest.raises(ValueError, match=words):
        writer.save(1, tensors, {})
