"""Locks on output folders: who holds one is named, a second process is refused, and a dead holder is found out."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from onward.errors import FolderInUseError
from onward.exclusive import lock as lock_module
from onward.exclusive.lock import LOCK_NAME, Holder, Locks, lock_outputs
from onward.exclusive.lock_file import LocalLockFile
from onward.exclusive.process_mark import ProcessMark

HOLD = """
import sys, time
from pathlib import Path
from onward.exclusive.lock import lock_outputs
locks = lock_outputs([Path(sys.argv[1])])
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


def hold(folder: Path, seconds: float = 60) -> subprocess.Popen[str]:
    """Another process that holds the lock of a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), str(seconds)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline() == "held\n"
    return process


def elsewhere(**changes: str) -> Holder:
    """A holder on another machine."""
    mark = ProcessMark("f" * 16, 4123, 77)
    holder = Holder(
        host="node7", process=str(mark), since="2026-11-22 11:40:05 UTC", command="onward train run.yaml", token="abc"
    )
    return dataclasses.replace(holder, **changes)


def test_a_second_process_is_refused_and_told_who_holds_the_lock(tmp_path: Path) -> None:
    process = hold(tmp_path)
    try:
        with pytest.raises(FolderInUseError) as caught:
            lock_outputs([tmp_path])
        text = str(caught.value)
        assert text.startswith(f"{tmp_path} is in use: python ")
        assert f", process {process.pid}, since 20" in text
        assert os.uname().nodename in text
        assert f"If it no longer exists, remove {tmp_path / LOCK_NAME}." in text
    finally:
        process.kill()
        process.wait()
    locks = lock_outputs([tmp_path])  # a killed holder is looked up, not waited for
    locks.check()
    locks.release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    assert hold(tmp_path, 0).wait() == 0
    assert list(tmp_path.iterdir()) == []


def test_all_or_none(tmp_path: Path) -> None:
    """Where one of several is held, the others are given back."""
    process = hold(tmp_path / "b")
    try:
        with pytest.raises(FolderInUseError, match="b is in use"):
            lock_outputs([tmp_path / "a", tmp_path / "b"], [tmp_path / "c.onnx"])
        assert [path.name for path in tmp_path.iterdir()] == ["b"]  # the folder "a" was made for its lock alone
    finally:
        process.kill()
        process.wait()


def test_a_file_is_locked_beside_it(tmp_path: Path) -> None:
    """Two files of one folder can be written at once."""
    first = lock_outputs([], [tmp_path / "a.onnx"])
    second = lock_outputs([], [tmp_path / "b.onnx"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.onnx.onward-lock", ".b.onnx.onward-lock"]
    first.release()
    second.release()


def test_a_holder_on_another_machine_that_shows_signs_of_life_is_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "ABANDONED_AFTER_SECONDS", 20.0)
    path = tmp_path / LOCK_NAME
    path.write_text(elsewhere().to_text())
    refresh = threading.Timer(1.5, lambda: os.utime(path))
    refresh.start()
    said: list[str] = []
    with pytest.raises(FolderInUseError, match=r"in use: onward train run\.yaml on node7, process 4123, since 2026"):
        lock_outputs([tmp_path], notify=said.append)
    refresh.join()
    assert len(said) == 1
    assert "watching for up to" in said[0]
    assert "node7" in said[0]
    assert json.loads(path.read_text())["token"] == "abc"


@pytest.mark.parametrize("content", [elsewhere().to_text(), "", "{", "[]", '{"host": 3}', "[" * 100000])
def test_a_silent_holder_on_another_machine_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    """Also one whose file is damaged, or was never completed."""
    monkeypatch.setattr(lock_module, "ABANDONED_AFTER_SECONDS", 1.0)
    (tmp_path / LOCK_NAME).write_text(content)
    locks = lock_outputs([tmp_path])
    assert ProcessMark.parse(json.loads((tmp_path / LOCK_NAME).read_text())["process"]) == ProcessMark.own()
    locks.release()


def test_an_old_lock_of_another_machine_is_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / LOCK_NAME
    path.write_text(elsewhere().to_text())
    os.utime(path, (time.time() - 3600,) * 2)
    begin = time.monotonic()
    lock_outputs([tmp_path]).release()
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("ahead_seconds", [-86400.0, 86400.0])
def test_clocks_of_machines_may_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_seconds: float) -> None:
    """The age of a lock is measured by the clock of the file system; that of this machine does not matter."""
    (tmp_path / LOCK_NAME).write_text(elsewhere().to_text())
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + ahead_seconds)
    age = LocalLockFile(tmp_path / LOCK_NAME).age_seconds()
    assert age is not None
    assert abs(age) < 10


def test_a_process_that_lost_its_lock_finds_out(tmp_path: Path) -> None:
    locks = lock_outputs([tmp_path])
    (tmp_path / LOCK_NAME).write_text(elsewhere().to_text())
    with pytest.raises(FolderInUseError, match=r"was taken over by onward train run\.yaml on node7"):
        locks.check()
    locks.release()
    assert (tmp_path / LOCK_NAME).is_file(), "the lock of the other one stays"


def _contend(folder: Path, seed: int, seconds: float) -> int:
    """Takes and gives back a lock; raises where another process was inside at the same time."""
    generator, held = random.Random(seed), 0
    end = time.monotonic() + seconds
    inside = folder / "inside"
    while time.monotonic() < end:
        try:
            locks: Locks = lock_outputs([folder])
        except FolderInUseError:
            time.sleep(generator.random() * 0.01)
            continue
        os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
        time.sleep(generator.random() * 0.003)
        inside.unlink()
        held += 1
        locks.release()
    return held


def test_only_one_of_many_holds_a_lock(tmp_path: Path) -> None:
    """Four processes take it and give it back as often as they can; no two are ever inside at once."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(4) as pool:
        held = pool.starmap(_contend, [(tmp_path, seed, 2.0) for seed in range(4)])
    assert sum(held) > 20


def test_remote_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a URL, a living holder of this machine is refused, a silent one of another machine replaced."""
    pytest.importorskip("fsspec")
    monkeypatch.setattr(lock_module, "ABANDONED_AFTER_SECONDS", 1.0)
    folder = Path(f"file://{tmp_path}/out")
    (tmp_path / "out").mkdir()
    place = tmp_path / "out" / LOCK_NAME
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        from onward.operating_system import machine_identity, process_start

        mark = ProcessMark(machine_identity(), process.pid, process_start(process.pid) or 0)
        place.write_text(elsewhere(process=str(mark), host="here").to_text())
        with pytest.raises(FolderInUseError, match=f"file:///.*out is in use: .* on here, process {process.pid}"):
            lock_outputs([folder])
    finally:
        process.kill()
        process.wait()
    place.write_text(elsewhere().to_text() + "\nbeat")
    locks = lock_outputs([folder])
    locks.check()
    file = lock_module.lock_file(folder / LOCK_NAME)
    text, before = file.read(), file.sign_of_life()
    assert text is not None
    file.refresh(text)
    assert file.sign_of_life() != before
    assert file.read() == text
    locks.check()
    locks.release()
    assert not place.exists()


def test_what_cannot_be_written_is_not_locked(tmp_path: Path) -> None:
    """Whoever writes there says what is wrong, with the field that names the folder."""
    (tmp_path / "file").write_text("x")
    lock_outputs([tmp_path / "file", tmp_path / "file" / "inside"]).release()
    assert (tmp_path / "file").read_text() == "x"
